// Dropout by sample, and its gradient, which is the same function of the output's gradient. Numbers (sample, feature) in float32
// or bfloat16 are retained and scaled, or set to zero. The mask is the hash of lockstep/network/dropout.py, to the bit.
//
// blockIdx.y is the sample; neighbouring threads take neighbouring features.

#include "numbers.cuh"

__device__ inline unsigned int mix(unsigned int x)
{
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// keys: one per sample. layer, call: the place in the network. least: smallest hash, as a signed number, of a retained feature.
template <typename T>
__device__ inline void drop(
    const T *from, T *to, const int *keys, int layer, int call, int least, float factor, int n_features)
{
    unsigned long long sample = blockIdx.y;
    unsigned int placed = mix(mix((unsigned int)keys[sample] ^ (unsigned int)layer) ^ (unsigned int)call);
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n_features; i += (int)(gridDim.x * blockDim.x)) {
        bool stays = (int)mix(placed ^ mix((unsigned int)i)) >= least;
        unsigned long long at = sample * n_features + i;
        narrow(to + at, widen(from[at]) * (stays ? factor : 0.0f));
    }
}

extern "C" __global__ void dropout_float32(
    const float *from, float *to, const int *keys, int layer, int call, int least, float factor, int n_features)
{
    drop(from, to, keys, layer, call, least, factor, n_features);
}

extern "C" __global__ void dropout_bfloat16(
    const bfloat16 *from, bfloat16 *to, const int *keys, int layer, int call, int least, float factor, int n_features)
{
    drop(from, to, keys, layer, call, least, factor, n_features);
}
