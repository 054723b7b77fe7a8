// Crops, mirrors, subtracts the mean image, shifts the colours and converts: uint8 (batch, row, column, channel) as it lies in
// the file, to float32 or bfloat16 as the network takes it (lockstep/data/augment.py is the host's version).
//
// Out come BLOCK x BLOCK pixels of a picture one behind the other, as the channels of one place: (batch, row of blocks, column
// of blocks, row in the block, column in the block, channel). With BLOCK 1 that is the picture; with 2 or 4, what its first
// convolution takes by space-to-depth (lockstep/network/convolution.py). The blocks begin `padding` rows and columns before the
// picture; what of them lies outside of it is zero, as a convolution's padding is.
//
// One block of threads makes one row of blocks of one image, blockIdx.x and blockIdx.y; there are as many columns of blocks as
// rows. Its threads write neighbouring numbers, so that what a warp writes lies together. The mean is taken at the picture's own
// place, before mirroring; shifts has three numbers an image, for red, green and blue, zeros where colours stay. In float32 the
// result is the host's to the bit; bfloat16 is that, rounded to nearest even.

#include "numbers.cuh"

typedef unsigned char uint8;

struct Crop {
    int row, column, mirror; // the corner in the picture, in pixels; whether to mirror
};

template <unsigned int BLOCK, typename T>
__device__ inline void augment(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, T *out, int height, int width,
    int size, int padding)
{
    enum { LINE = BLOCK * 3, WHOLE = BLOCK * LINE }; // numbers of a block's row, and of a block
    unsigned long long image = blockIdx.y;
    Crop crop = crops[image];
    images += image * height * width * 3;
    shifts += image * 3;
    out += (image * gridDim.x + blockIdx.x) * gridDim.x * WHOLE;
    for (unsigned int number = threadIdx.x; number < gridDim.x * WHOLE; number += blockDim.x) {
        unsigned int inside = number % WHOLE, colour = number % 3; // by constants: the compiler multiplies
        int row = (int)(blockIdx.x * BLOCK + inside / LINE) - padding;
        int column = (int)(number / WHOLE * BLOCK + inside % LINE / 3) - padding;
        float value = 0;
        if (row >= 0 && row < size && column >= 0 && column < size) {
            if (crop.mirror)
                column = size - 1 - column;
            int from = ((crop.row + row) * width + crop.column + column) * 3 + (int)colour;
            value = (float)images[from] - mean[from] + shifts[colour];
        }
        narrow(out + number, value);
    }
}

template <typename T>
__device__ inline void augment_in(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, T *out, int height, int width,
    int size, int block, int padding)
{
    if (block == 4)
        augment<4>(images, crops, shifts, mean, out, height, width, size, padding);
    else if (block == 2)
        augment<2>(images, crops, shifts, mean, out, height, width, size, padding);
    else
        augment<1>(images, crops, shifts, mean, out, height, width, size, padding);
}

extern "C" __global__ void augment_float32(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, float *out, int height, int width,
    int size, int block, int padding)
{
    augment_in(images, crops, shifts, mean, out, height, width, size, block, padding);
}

extern "C" __global__ void augment_bfloat16(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, bfloat16 *out, int height, int width,
    int size, int block, int padding)
{
    augment_in(images, crops, shifts, mean, out, height, width, size, block, padding);
}
