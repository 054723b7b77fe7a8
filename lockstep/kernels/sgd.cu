// SGD with momentum on float32 weights with bfloat16 gradients, which writes the weights' bfloat16 copies where they are wanted:
// one pass over what lockstep/network/working.py else does in several. The arithmetic is that of torch's fused SGD on GPUs:
// scalars are doubles, and each line's result is rounded to float32.
//
// blockIdx.y is the tensor; a thread takes four neighbouring numbers, and what is left of a tensor one by one.

#include "numbers.cuh"

#define MOST_TENSORS 64

struct Tensor {
    float *weight, *momenta; // momenta: null without momentum
    const bfloat16 *gradient;
    bfloat16 *copy; // null where weights change again before they are used
    unsigned long long n;
    double rate, decay;
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

extern "C" __global__ void sgd(const __grid_constant__ Tensors tensors, double momentum, int nesterov)
{
    const Tensor &at = tensors.of[blockIdx.y];
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long thread = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
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
