// Local response normalisation across channels, and its gradient, in float32 or bfloat16, on numbers (pixel, channel).
// lockstep/network/layers.py has the formulas, and an implementation in torch.
//
// One thread writes CHUNK neighbouring channels of one pixel, 16 bytes. It reads them and as much of the chunks on either side
// as its own sums and its neighbours' sums need, and computes in float32. At most n = 5 channels are summed; the number of
// channels is a multiple of CHUNK. The gradient needs only x from the forward pass.

#include "numbers.cuh"

struct Form {
    int n;
    float k, alpha, beta;
};

// Roots and quotients: exact ones for float32. For bfloat16, the device's approximations: they are within 2 units in the last
// place of float32, which bfloat16's 8 bits hide, and take one instruction instead of about ten.
struct Exact {
    static __device__ inline float quotient(float a, float b) { return a / b; }
    static __device__ inline float three_quarters(float base) // base^-0.75
    {
        float root = 1.0f / sqrtf(base);
        return root * sqrtf(root);
    }
};
struct Fast {
    static __device__ inline float quotient(float a, float b) { return __fdividef(a, b); }
    static __device__ inline float three_quarters(float base)
    {
        float root = rsqrtf(base > 3e38f ? 3e38f : base); // the root of infinity would give zero times infinity
        return root * root * rsqrtf(root);
    }
};
template <typename Chunk>
struct Arithmetic : Exact {};
template <>
struct Arithmetic<Bfloats> : Fast {};

// base^-beta; for the published beta by two roots, which is several times cheaper than a power.
template <typename Chunk>
__device__ inline float power(float base, float beta)
{
    return beta == 0.75f ? Arithmetic<Chunk>::three_quarters(base) : powf(base, -beta);
}

// Load the chunk and 4 channels on either side; zero outside the pixel's channels.
template <typename Chunk>
__device__ inline void load(const Chunk *from, int place, int n_chunks, float *values)
{
    enum { CHUNK = Chunk::CHUNK };
    for (int side = -1; side <= 1; side++) {
        int first = side < 0 ? CHUNK - 4 : 0, last = side > 0 ? 4 : CHUNK;
        bool exists = place + side >= 0 && place + side < n_chunks;
        Chunk chunk = exists ? from[side] : Chunk{};
        for (int i = first; i < last; i++)
            values[4 + side * CHUNK + i] = widen(chunk.of[i]);
    }
}

// k + alpha * the sum of squares of the n channels around `at`, in the order of the channels.
__device__ inline float base(const float *x, int at, Form form)
{
    float sum = 0.0f;
    for (int i = at - 2; i <= at + 2; i++)
        if (i >= at - form.n / 2 && i <= at + form.n / 2)
            sum += x[i] * x[i];
    return form.k + form.alpha * sum;
}

template <typename Chunk>
__device__ inline void forward(const Chunk *x, Chunk *y, unsigned long long n, int n_chunks, Form form)
{
    enum { CHUNK = Chunk::CHUNK };
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < n; i += stride) {
        float values[CHUNK + 8];
        Chunk made;
        load(x + i, (int)(i % n_chunks), n_chunks, values);
        for (int c = 0; c < CHUNK; c++)
            narrow(&made.of[c], values[4 + c] * power<Chunk>(base(values, 4 + c, form), form.beta));
        y[i] = made;
    }
}

template <typename Chunk>
__device__ inline void backward(
    const Chunk *x, const Chunk *gradient, Chunk *out, unsigned long long n, int n_chunks, Form form)
{
    enum { CHUNK = Chunk::CHUNK };
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < n; i += stride) {
        float values[CHUNK + 8], given[CHUNK + 8], scale[CHUNK + 8], part[CHUNK + 8];
        int place = (int)(i % n_chunks);
        load(x + i, place, n_chunks, values);
        load(gradient + i, place, n_chunks, given);
#pragma unroll // otherwise ptxas of CUDA 13.0 keeps these arrays in local memory (sm_100, sm_120)
        for (int c = 2; c < CHUNK + 6; c++) {
            float sum = base(values, c, form);
            scale[c] = power<Chunk>(sum, form.beta);
            part[c] = Arithmetic<Chunk>::quotient(given[c] * values[c] * scale[c], sum);
        }
        Chunk made;
        for (int c = 4; c < CHUNK + 4; c++) {
            float total = 0.0f;
            for (int j = c - 2; j <= c + 2; j++)
                if (j >= c - form.n / 2 && j <= c + form.n / 2)
                    total += part[j];
            narrow(&made.of[c - 4], given[c] * scale[c] - 2.0f * form.alpha * form.beta * values[c] * total);
        }
        out[i] = made;
    }
}

// n: chunks in all; n_chunks: chunks of one pixel.
extern "C" __global__ void lrn_forward_float32(const Floats *x, Floats *y, unsigned long long n, int n_chunks, Form form)
{
    forward(x, y, n, n_chunks, form);
}

extern "C" __global__ void lrn_forward_bfloat16(const Bfloats *x, Bfloats *y, unsigned long long n, int n_chunks, Form form)
{
    forward(x, y, n, n_chunks, form);
}

extern "C" __global__ void lrn_backward_float32(
    const Floats *x, const Floats *gradient, Floats *out, unsigned long long n, int n_chunks, Form form)
{
    backward(x, gradient, out, n, n_chunks, form);
}

extern "C" __global__ void lrn_backward_bfloat16(
    const Bfloats *x, const Bfloats *gradient, Bfloats *out, unsigned long long n, int n_chunks, Form form)
{
    backward(x, gradient, out, n, n_chunks, form);
}
