// Crops, mirrors, subtracts the mean image, shifts the colours and converts: uint8 (batch, row, column, channel) as it lies in
// the file, to float32 or bfloat16 (batch, row, column, channel) as the network takes it (lockstep/data/augment.py is the host's
// version).
//
// One block makes one row of one image, blockIdx.x and blockIdx.y; its threads write neighbouring numbers, so that what a warp
// writes lies together. The mean is taken at the picture's own place, before mirroring; shifts has three numbers an image, for
// red, green and blue, zeros where colours stay. In float32 the result is the host's to the bit; bfloat16 is that, rounded to
// nearest even.

#include "numbers.cuh"

typedef unsigned char uint8;

struct Crop {
    int row, column, mirror; // the corner in the picture, in pixels; whether to mirror
};

template <typename T>
__device__ inline void augment(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, T *out, int height, int width,
    int size)
{
    unsigned long long image = blockIdx.y, row = blockIdx.x;
    Crop crop = crops[image];
    unsigned long long place = ((crop.row + row) * width + crop.column) * 3; // of the row's first number
    const uint8 *source = images + image * height * width * 3 + place;
    T *target = out + (image * size + row) * size * 3;
    mean += place;
    shifts += image * 3;
    for (int number = (int)threadIdx.x; number < size * 3; number += (int)blockDim.x) {
        int column = number / 3; // by a constant: the compiler multiplies
        int from = crop.mirror ? number + (size - 1 - 2 * column) * 3 : number;
        narrow(target + number, (float)source[from] - mean[from] + shifts[number - 3 * column]);
    }
}

extern "C" __global__ void augment_float32(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, float *out, int height, int width,
    int size)
{
    augment(images, crops, shifts, mean, out, height, width, size);
}

extern "C" __global__ void augment_bfloat16(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, bfloat16 *out, int height, int width,
    int size)
{
    augment(images, crops, shifts, mean, out, height, width, size);
}
