// The kernels' numbers: conversion between bfloat16 and float32, rounded to nearest even, and chunks of 16 bytes of either.
//
// There is no include guard: each .cu file includes this once, and tests put each file into a namespace.

typedef unsigned short bfloat16;

template <typename Number>
struct alignas(16) Numbers {
    enum { CHUNK = 16 / sizeof(Number) };
    Number of[CHUNK];
};
typedef Numbers<float> Floats;
typedef Numbers<bfloat16> Bfloats;

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(bfloat16 value) { return __uint_as_float((unsigned int)value << 16); }
__device__ inline void narrow(float *to, float value) { *to = value; }
__device__ inline void narrow(bfloat16 *to, float value)
{
    unsigned int bits = __float_as_uint(value);
    *to = value != value ? 0x7fff : (bfloat16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
