// Reduce a span of several float32 arrays, and write the result into several arrays (lockstep/exchange/__init__.py).
//
// One thread takes four neighbouring floats: it reads them from every source in rank order, reduces them, and writes the
// result to every target. The order and the operations are those of the host's reduction (lockstep/exchange/reduction.py), so
// both give the same bits. The addresses stay in the kernel's parameters (__grid_constant__), which all threads read from one
// cache; otherwise each thread would have a copy. Arrays of other ranks are accessed through pointers that CUDA IPC has
// opened. A target may be a source.

#define MOST_ARRAYS 16
#define MOST_SOURCES 64 // partial sums of all ranks
#define MOST_WAITING 32 // levels of a tree

struct Arrays {
    float *of[MOST_ARRAYS];
};

struct Sum {
    static __device__ inline float of(float a, float b) { return a + b; }
};
struct Product {
    static __device__ inline float of(float a, float b) { return a * b; }
};
struct Maximum { // propagates NaN, as NumPy does
    static __device__ inline float of(float a, float b) { return a >= b || a != a ? a : b; }
};
struct Minimum {
    static __device__ inline float of(float a, float b) { return a <= b || a != a ? a : b; }
};

// first, last: elements of the span; first is a multiple of four. Up to three floats behind the last four are reduced one by
// one. divisor: divides the result.
template <typename Combine>
__device__ inline void fold(
    const Arrays &from, const Arrays &to, int n_from, int n_to, unsigned long long first, unsigned long long last, float divisor)
{
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long thread = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    for (unsigned long long i = first / 4 + thread; i < last / 4; i += stride) {
        float4 total = ((const float4 *)from.of[0])[i];
        for (int rank = 1; rank < n_from; rank++) {
            float4 part = ((const float4 *)from.of[rank])[i];
            total.x = Combine::of(total.x, part.x);
            total.y = Combine::of(total.y, part.y);
            total.z = Combine::of(total.z, part.z);
            total.w = Combine::of(total.w, part.w);
        }
        float4 result = {total.x / divisor, total.y / divisor, total.z / divisor, total.w / divisor};
        for (int rank = 0; rank < n_to; rank++)
            ((float4 *)to.of[rank])[i] = result;
    }
    for (unsigned long long i = last / 4 * 4 + thread; i < last; i += stride) {
        float total = from.of[0][i];
        for (int rank = 1; rank < n_from; rank++)
            total = Combine::of(total, from.of[rank][i]);
        for (int rank = 0; rank < n_to; rank++)
            to.of[rank][i] = total / divisor;
    }
}

extern "C" __global__ void fold_mean(
    const __grid_constant__ Arrays from, const __grid_constant__ Arrays to, int n_from, int n_to, unsigned long long first, unsigned long long last)
{
    fold<Sum>(from, to, n_from, n_to, first, last, (float)n_from);
}

extern "C" __global__ void fold_sum(
    const __grid_constant__ Arrays from, const __grid_constant__ Arrays to, int n_from, int n_to, unsigned long long first, unsigned long long last)
{
    fold<Sum>(from, to, n_from, n_to, first, last, 1.0f);
}

extern "C" __global__ void fold_max(
    const __grid_constant__ Arrays from, const __grid_constant__ Arrays to, int n_from, int n_to, unsigned long long first, unsigned long long last)
{
    fold<Maximum>(from, to, n_from, n_to, first, last, 1.0f);
}

extern "C" __global__ void fold_min(
    const __grid_constant__ Arrays from, const __grid_constant__ Arrays to, int n_from, int n_to, unsigned long long first, unsigned long long last)
{
    fold<Minimum>(from, to, n_from, n_to, first, last, 1.0f);
}

extern "C" __global__ void fold_prod(
    const __grid_constant__ Arrays from, const __grid_constant__ Arrays to, int n_from, int n_to, unsigned long long first, unsigned long long last)
{
    fold<Product>(from, to, n_from, n_to, first, last, 1.0f);
}

// The binary tree of sums of neighbouring arrays: WIDTH arrays from FIRST on, as far as they exist. Its shape is known at
// compile time, so that sums stay in registers.
template <int FIRST, int WIDTH>
__device__ inline float tree(const Arrays &from, int n_from, unsigned long long i)
{
    if constexpr (WIDTH == 1) {
        return from.of[FIRST][i];
    } else {
        float sum = tree<FIRST, WIDTH / 2>(from, n_from, i);
        if (FIRST + WIDTH / 2 < n_from)
            sum += tree<FIRST + WIDTH / 2, WIDTH / 2>(from, n_from, i);
        return sum;
    }
}

extern "C" __global__ void fold_pairwise(
    const __grid_constant__ Arrays from, const __grid_constant__ Arrays to, int n_from, int n_to, unsigned long long first, unsigned long long last)
{
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long thread = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    for (unsigned long long i = first + thread; i < last; i += stride) {
        float total = tree<0, MOST_ARRAYS>(from, n_from, i);
        for (int rank = 0; rank < n_to; rank++)
            to.of[rank][i] = total;
    }
}

// sums: how many sums to take after each source; a sum adds the two last values that wait.
struct Tree {
    float *of[MOST_SOURCES];
    unsigned char sums[MOST_SOURCES];
};

// A tree of any shape over partial sums, several of which may be one rank's (lockstep/exchange/tree.py).
extern "C" __global__ void fold_tree(
    const __grid_constant__ Tree from, const __grid_constant__ Arrays to, int n_from, int n_to, unsigned long long first, unsigned long long last)
{
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long thread = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    for (unsigned long long i = first + thread; i < last; i += stride) {
        float waiting[MOST_WAITING];
        int n_waiting = 0;
        for (int source = 0; source < n_from; source++) {
            float sum = from.of[source][i];
            for (int n = from.sums[source]; n > 0; n--)
                sum = waiting[--n_waiting] + sum;
            waiting[n_waiting++] = sum;
        }
        for (int rank = 0; rank < n_to; rank++)
            to.of[rank][i] = waiting[0];
    }
}
