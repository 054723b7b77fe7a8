// Crops, mirrors, subtracts the mean image and converts: uint8 (batch, row, column, channel) as it lies in the file, to
// float32 or bfloat16 (batch, row, column, channel) as the network takes it (lockstep/data/augment.py is the host's version).
//
// One thread makes one pixel of the result, all three channels; blockIdx.y is the image. The mean is taken at the picture's own place, before
// mirroring. In float32 the result is the host's to the bit; bfloat16 is that, rounded to nearest even.

typedef unsigned char uint8;
typedef unsigned short bfloat16;

struct Crop {
    int row, column, mirror; // the corner in the picture, in pixels; whether to mirror
};

__device__ inline void store(float *to, float value) { *to = value; }

__device__ inline void store(bfloat16 *to, float value)
{
    unsigned int bits = __float_as_uint(value); // finite: a byte less a mean
    *to = (bfloat16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <typename T>
__device__ inline void augment(
    const uint8 *images, const Crop *crops, const float *mean, T *out, int height, int width, int size)
{
    int pixel = (int)(blockIdx.x * blockDim.x + threadIdx.x); // of the result; 32 bits, for its division is slow
    if (pixel >= size * size)
        return;
    unsigned long long image = blockIdx.y;
    int row = pixel / size, column = pixel % size;
    Crop crop = crops[image];
    int from_column = crop.column + (crop.mirror ? size - 1 - column : column);
    int place = ((crop.row + row) * width + from_column) * 3;
    const uint8 *source = images + image * height * width * 3 + place;
    T *target = out + (image * size * size + pixel) * 3;
    for (int channel = 0; channel < 3; channel++)
        store(target + channel, (float)source[channel] - mean[place + channel]);
}

extern "C" __global__ void augment_float32(
    const uint8 *images, const Crop *crops, const float *mean, float *out, int height, int width, int size)
{
    augment(images, crops, mean, out, height, width, size);
}

extern "C" __global__ void augment_bfloat16(
    const uint8 *images, const Crop *crops, const float *mean, bfloat16 *out, int height, int width, int size)
{
    augment(images, crops, mean, out, height, width, size);
}
