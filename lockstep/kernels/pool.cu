// ReLU and max pooling behind it, in float32 or bfloat16, on numbers that lie (image, row, column, channel):
// lockstep/network/pool.py is the same in torch. Windows are square, without padding.
//
// Forward, a thread makes CHUNK neighbouring channels of one output, 16 bytes, and notes in a byte each which place of the
// window was the first largest, row by row; NONE where none was above zero. Backward, a thread gathers the gradients of the
// outputs that took their value from its CHUNK numbers: nothing is zeroed or added to, and the sum has one order.

#include "numbers.cuh"

typedef unsigned int uint;

template <int CHUNK>
struct alignas(CHUNK) Places {
    unsigned char of[CHUNK];
};
enum { NONE = 255 };

// Rows and columns of the images and of what is made of them; chunks of a pixel; the window's size and step.
struct Form {
    uint rows, columns, out_rows, out_columns, n_chunks, size, stride;
};

template <typename Chunk>
__device__ inline void forward(const Chunk *x, Chunk *y, Places<Chunk::CHUNK> *places, uint n, Form form)
{
    enum { CHUNK = Chunk::CHUNK };
    for (uint i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        uint chunk = i % form.n_chunks, pixel = i / form.n_chunks;
        uint column = pixel % form.out_columns, line = pixel / form.out_columns;
        uint row = line % form.out_rows, image = line / form.out_rows;
        float best[CHUNK] = {};
        Places<CHUNK> place;
        for (int c = 0; c < CHUNK; c++)
            place.of[c] = NONE;
        for (uint down = 0; down < form.size; down++)
            for (uint right = 0; right < form.size; right++) {
                unsigned long long from = image * (unsigned long long)form.rows + row * form.stride + down;
                from = from * form.columns + column * form.stride + right;
                Chunk given = x[from * form.n_chunks + chunk];
                for (int c = 0; c < CHUNK; c++) {
                    float value = widen(given.of[c]);
                    if (value > best[c] || value != value) {
                        best[c] = value;
                        place.of[c] = (unsigned char)(down * form.size + right);
                    }
                }
            }
        Chunk made;
        for (int c = 0; c < CHUNK; c++)
            narrow(&made.of[c], best[c]);
        y[i] = made;
        places[i] = place;
    }
}

template <typename Chunk>
__device__ inline void backward(
    const Chunk *gradient, const Places<Chunk::CHUNK> *places, Chunk *out, uint n, Form form)
{
    enum { CHUNK = Chunk::CHUNK };
    for (uint i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        uint chunk = i % form.n_chunks, pixel = i / form.n_chunks;
        uint column = pixel % form.columns, line = pixel / form.columns;
        uint row = line % form.rows, image = line / form.rows;
        // the first window that reaches this far; the last one begins here or before
        uint top = row < form.size ? 0 : (row - form.size) / form.stride + 1;
        uint left = column < form.size ? 0 : (column - form.size) / form.stride + 1;
        float sum[CHUNK] = {};
        for (uint above = top; above < form.out_rows && above * form.stride <= row; above++)
            for (uint before = left; before < form.out_columns && before * form.stride <= column; before++) {
                uint place = (row - above * form.stride) * form.size + column - before * form.stride;
                unsigned long long at = image * (unsigned long long)form.out_rows + above;
                at = (at * form.out_columns + before) * form.n_chunks + chunk;
                Places<CHUNK> taken = places[at];
                Chunk given = gradient[at];
                for (int c = 0; c < CHUNK; c++)
                    sum[c] += taken.of[c] == place ? widen(given.of[c]) : 0.0f;
            }
        Chunk made;
        for (int c = 0; c < CHUNK; c++)
            narrow(&made.of[c], sum[c]);
        out[i] = made;
    }
}

// n: chunks that are made, fewer than 2^31.
extern "C" __global__ void pool_forward_float32(const Floats *x, Floats *y, Places<4> *places, uint n, Form form)
{
    forward(x, y, places, n, form);
}

extern "C" __global__ void pool_forward_bfloat16(const Bfloats *x, Bfloats *y, Places<8> *places, uint n, Form form)
{
    forward(x, y, places, n, form);
}

extern "C" __global__ void pool_backward_float32(
    const Floats *gradient, const Places<4> *places, Floats *out, uint n, Form form)
{
    backward(gradient, places, out, n, form);
}

extern "C" __global__ void pool_backward_bfloat16(
    const Bfloats *gradient, const Places<8> *places, Bfloats *out, uint n, Form form)
{
    backward(gradient, places, out, n, form);
}
