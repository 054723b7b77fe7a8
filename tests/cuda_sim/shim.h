// Lets g++ compile the CUDA kernels of lockstep/kernels for the host, so that their arithmetic and indexing are tested
// where there is no GPU. Threads run one after the other: it is for kernels that neither share memory nor synchronise.

#pragma once
#include <cmath>
#include <cstddef>
#include <cstring>
#include <tuple>

#define __global__
#define __device__
#define __grid_constant__

struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint3 {
    unsigned int x, y, z;
};
static thread_local uint3 gridDim, blockDim, blockIdx, threadIdx;

inline unsigned int __float_as_uint(float value)
{
    unsigned int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned int bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned long long atomicAdd(unsigned long long *to, unsigned long long value)
{
    unsigned long long old = *to;
    *to += value;
    return old;
}

// The device's own functions, as far from the exact value as NVIDIA's guide allows them to be: 2 units in the last place.
inline float approximate_rsqrt(float value)
{
    float root = 1.0f / std::sqrt(value);
    return std::nextafter(std::nextafter(root, INFINITY), INFINITY);
}
#define rsqrtf approximate_rsqrt // some C libraries have that name, too

inline float __fdividef(float a, float b)
{
    float quotient = std::fabs(b) > 0x1p126f && std::fabs(b) < INFINITY ? 0.0f : a / b; // as the device does
    return std::nextafter(std::nextafter(quotient, INFINITY), INFINITY);
}

// The next argument from a packed buffer, aligned as the driver's cuLaunchKernel packs them.
template <typename T>
T take(const char *packed, size_t &offset)
{
    offset = (offset + alignof(T) - 1) / alignof(T) * alignof(T);
    T value;
    memcpy(&value, packed + offset, sizeof value);
    offset += sizeof value;
    return value;
}

template <typename... Arguments>
void launch(void (*kernel)(Arguments...), const char *packed, unsigned int blocks, unsigned int rows, unsigned int threads)
{
    size_t offset = 0;
    std::tuple<Arguments...> arguments{take<Arguments>(packed, offset)...};
    gridDim = {blocks, rows, 1};
    blockDim = {threads, 1, 1};
    for (unsigned int block = 0; block < blocks * rows; block++)
        for (unsigned int thread = 0; thread < threads; thread++) {
            blockIdx = {block % blocks, block / blocks, 0};
            threadIdx = {thread, 0, 0};
            std::apply(kernel, arguments);
        }
}
