// SGD with momentum on float32 weights with bfloat16 gradients. It can write the weights' bfloat16 copies too: one pass over
// memory, where lockstep/network/low_precision.py needs several. The arithmetic is that of torch's fused SGD on GPUs: scalars
// are doubles, and each line's result is rounded to float32.
//
// Each tensor has a range of blocks in proportion to its length. A thread takes four neighbouring numbers at a time; the last
// up to three numbers of a tensor are taken one by one.

#include "numbers.cuh"

#define MOST_TENSORS 48

struct Tensor {
    float *weight, *momenta; // momenta: null without momentum
    const bfloat16 *gradient;
    bfloat16 *copy; // null if weights change again before their next use
    unsigned long long n;
    double rate, decay;
    unsigned int first_block, n_blocks;
};
struct Tensors {
    Tensor of[MOST_TENSORS];
};
struct alignas(8) Bfloats4 {
    bfloat16 of[4];
};

__device__ inline float update(float weight, float gradient, float *momentum_of, double momentum, int nesterov, const Tensor &at)
{
    if (at.decay != 0)
        gradient = (float)(gradient + at.decay * weight);
    if (momentum_of) {
        float velocity = (float)(momentum * *momentum_of + gradient);
        *momentum_of = velocity;
        gradient = nesterov ? (float)(gradient + momentum * velocity) : velocity;
    }
    return (float)(weight - at.rate * gradient);
}

extern "C" __global__ void sgd(const __grid_constant__ Tensors tensors, double momentum, int nesterov, int n_tensors)
{
    int number = 0;
    while (number + 1 < n_tensors && blockIdx.x >= tensors.of[number + 1].first_block)
        number++;
    const Tensor &at = tensors.of[number];
    unsigned long long stride = (unsigned long long)at.n_blocks * blockDim.x;
    unsigned long long thread = (blockIdx.x - at.first_block) * (unsigned long long)blockDim.x + threadIdx.x;
    for (unsigned long long i = thread; i < at.n / 4; i += stride) {
        float4 weights = ((float4 *)at.weight)[i], momenta = {};
        if (at.momenta)
            momenta = ((float4 *)at.momenta)[i];
        Bfloats4 given = ((const Bfloats4 *)at.gradient)[i], copies;
        float *weight = &weights.x, *velocity = &momenta.x;
        for (int c = 0; c < 4; c++) {
            weight[c] = update(weight[c], widen(given.of[c]), at.momenta ? velocity + c : nullptr, momentum, nesterov, at);
            narrow(&copies.of[c], weight[c]);
        }
        ((float4 *)at.weight)[i] = weights;
        if (at.momenta)
            ((float4 *)at.momenta)[i] = momenta;
        if (at.copy)
            ((Bfloats4 *)at.copy)[i] = copies;
    }
    for (unsigned long long i = at.n / 4 * 4 + thread; i < at.n; i += stride) {
        float weight = update(
            at.weight[i], widen(at.gradient[i]), at.momenta ? at.momenta + i : nullptr, momentum, nesterov, at);
        at.weight[i] = weight;
        if (at.copy)
            narrow(at.copy + i, weight);
    }
}
