// Augmentation, from uint8 (batch, row, column, channel) as in the files to what the network takes.
//
// The second part of the file has the last step of every run: crop, mirror, subtract the mean image, shift the colours and
// convert to float32 or bfloat16 (lockstep/data/augment.py is the host's version). The first part has the changes that some
// keys ask for. They come before, each is a kernel of its own, and they make uint8 images of the network's size with the
// host's bits: crop, jitter and erase as lockstep/data/preparing.py, mix as lockstep/data/mixing.py. One block of threads
// takes one row (blockIdx.x) of one image (blockIdx.y).

#include "numbers.cuh"

typedef unsigned char uint8;

struct Box {
    int row, column, rows, columns;
};

struct Change { // of an image in the slot; CHANGE of lockstep/loading/augment_records.py
    Box box; // of the stored image, from which the crop is made; without rows there is no image
    int mirror;
    int order[4]; // of the factors, -1 for none
    float factors[4]; // by BRIGHTNESS, CONTRAST, SATURATION, HUE
    Box erased; // of the crop
    uint8 color[4]; // of the erased part
};

struct Pair { // of images that are mixed; PAIR of lockstep/loading/augment_records.py
    int own, partner; // numbers of images
    int weight; // of the own image, in 1/256
    Box box; // that is replaced by the partner's; without rows the images are blended
};

enum { BRIGHTNESS, CONTRAST, SATURATION, HUE, N_JITTERS };

__device__ inline bool holds(const Box &box, int row, int column)
{
    return row >= box.row && row < box.row + box.rows && column >= box.column && column < box.column + box.columns;
}

// One color of a pixel of an image with a border, which is black or repeats the image mirrored at its outermost pixels.
__device__ inline int bordered(
    const uint8 *image, int row, int column, int color, int height, int width, int colors, int reflects)
{
    if (reflects) {
        row = row < 0 ? -row : row >= height ? 2 * (height - 1) - row : row;
        column = column < 0 ? -column : column >= width ? 2 * (width - 1) - column : column;
    }
    if (row < 0 || row >= height || column < 0 || column >= width)
        return 0;
    return image[((long long)row * width + column) * colors + color];
}

// A filter is the first pixel, the shift of the sum to the right, and weights (lockstep/kernels/filters.py).
enum { FIRST, SHIFT, HEAD };

__device__ inline int shifted(int sum, int shift)
{
    int value = (sum + (1 << (shift - 1))) >> shift;
    return value > 255 ? 255 : value;
}

// One color of a pixel of a scaled box. Each row is scaled and rounded first, then the column of the results.
__device__ inline int scaled(
    const uint8 *box, const short *down, const short *across, int n_down, int n_across, int width, int colors)
{
    int sum = 0;
    for (int row = 0; row < n_down - HEAD; row++) {
        if (!down[HEAD + row])
            continue; // what has no weight may lie outside the image
        const uint8 *line = box + (long long)(down[FIRST] + row) * width * colors;
        int line_sum = 0;
        for (int column = 0; column < n_across - HEAD; column++)
            if (across[HEAD + column])
                line_sum += across[HEAD + column] * line[(across[FIRST] + column) * colors];
        sum += down[HEAD + row] * shifted(line_sum, across[SHIFT]);
    }
    return shifted(sum, down[SHIFT]);
}

// Make crops of `rows` and `columns`. `down` has a filter of n_down numbers for each number of rows that a box may have and each
// new row; `across` likewise. They are not needed where all boxes have the crops' size.
extern "C" __global__ void augment_resized_crop(
    const uint8 *stored, const Change *changes, const short *down, const short *across, uint8 *crops, int n_down, int n_across,
    int height, int width, int rows, int columns, int colors, int reflects)
{
    unsigned long long image = blockIdx.y;
    const Change &change = changes[image];
    const Box box = change.box;
    if (!box.rows)
        return;
    stored += image * height * width * colors;
    crops += (image * rows + blockIdx.x) * columns * colors;
    bool has_size = box.rows == rows && box.columns == columns;
    if (!has_size) {
        stored += ((long long)box.row * width + box.column) * colors;
        down += ((long long)(box.rows - 1) * rows + blockIdx.x) * n_down;
        across += (long long)(box.columns - 1) * columns * n_across;
    }
    for (int number = threadIdx.x; number < columns * colors; number += blockDim.x) {
        int color = number % colors, column = number / colors, row = blockIdx.x;
        if (change.mirror)
            column = columns - 1 - column;
        crops[number] = has_size
            ? bordered(stored, box.row + row, box.column + column, color, height, width, colors, reflects)
            : scaled(stored + color, down, across + (long long)column * n_across, n_down, n_across, width, colors);
    }
}

// Color jitter, with Pillow's arithmetic on uint8 images.
struct Rgb {
    int red, green, blue;
};

__device__ inline int gray_of(Rgb pixel)
{
    return (pixel.red * 19595 + pixel.green * 38470 + pixel.blue * 7471 + 0x8000) >> 16;
}

__device__ inline int blend(int from, int to, float share)
{
    float value = (float)from + share * (float)(to - from);
    return value <= 0 ? 0 : value >= 255 ? 255 : (int)value;
}

__device__ inline Rgb blend(int gray, Rgb pixel, float share)
{
    return {blend(gray, pixel.red, share), blend(gray, pixel.green, share), blend(gray, pixel.blue, share)};
}

__device__ inline int to_nearest(double value) { return (int)(value + 0.5); } // for values that are not negative

// Add `turn` to a pixel's hue modulo 256. Hue, saturation and value have 8 bits each.
__device__ inline Rgb turned(Rgb pixel, int turn)
{
    int most = pixel.red > pixel.green ? pixel.red : pixel.green;
    int least = pixel.red < pixel.green ? pixel.red : pixel.green;
    most = pixel.blue > most ? pixel.blue : most;
    least = pixel.blue < least ? pixel.blue : least;
    if (most == least)
        return pixel;
    float range = (float)(most - least);
    float red = (float)(most - pixel.red) / range, green = (float)(most - pixel.green) / range;
    float blue = (float)(most - pixel.blue) / range;
    float sixths = pixel.red == most ? blue - green
        : pixel.green == most        ? (float)(2.0 + red - blue)
                                     : (float)(4.0 + green - red);
    double circles = sixths / 6.0 + 1.0;
    float hue = (float)(circles >= 1 ? circles - 1 : circles);
    int saturation = (int)(range / (float)most * 255.0);
    int new_hue = ((int)(hue * 255.0) + turn) & 255;
    if (!saturation)
        return {most, most, most};
    int sextant = (int)((float)new_hue * 6.0 / 255.0);
    float rest = (float)((float)new_hue * 6.0 / 255.0 - (float)sextant), share = (float)((float)saturation / 255.0);
    int low = to_nearest((float)most * (1.0 - share));
    int falling = to_nearest((float)most * (1.0 - share * rest));
    int rising = to_nearest((float)most * (1.0 - share * (1.0 - rest)));
    switch (sextant % 6) {
    case 0:
        return {most, rising, low};
    case 1:
        return {falling, most, low};
    case 2:
        return {low, most, rising};
    case 3:
        return {low, falling, most};
    case 4:
        return {rising, low, most};
    default:
        return {most, low, falling};
    }
}

// Apply an image's jitters in their order, up to the first of kind `end`. `mean` is the image's mean gray at its CONTRAST.
__device__ inline Rgb jittered(const uint8 *pixel, const Change &change, int end, int mean)
{
    Rgb now = {pixel[0], pixel[1], pixel[2]};
    for (int place = 0; place < N_JITTERS && change.order[place] != end; place++) {
        int kind = change.order[place];
        if (kind < 0)
            continue;
        float factor = change.factors[kind];
        if (kind == HUE)
            now = turned(now, (int)factor);
        else
            now = blend(kind == BRIGHTNESS ? 0 : kind == CONTRAST ? mean : gray_of(now), now, factor);
    }
    return now;
}

// Add up the gray of each image as it is when its contrast is changed. The sums are whole numbers, so their order has no effect.
extern "C" __global__ void augment_sum_gray(
    const uint8 *crops, const Change *changes, unsigned long long *sums, int rows, int columns)
{
    unsigned long long image = blockIdx.y, sum = 0;
    const Change &change = changes[image];
    bool has_contrast = false;
    for (int place = 0; place < N_JITTERS; place++)
        has_contrast |= change.order[place] == CONTRAST;
    if (!change.box.rows || !has_contrast)
        return;
    crops += (image * rows + blockIdx.x) * columns * 3;
    for (int column = threadIdx.x; column < columns; column += blockDim.x)
        sum += gray_of(jittered(crops + column * 3, change, CONTRAST, 0));
    atomicAdd(sums + image, sum);
}

extern "C" __global__ void augment_jitter(
    uint8 *crops, const Change *changes, const unsigned long long *sums, int rows, int columns)
{
    unsigned long long image = blockIdx.y, n_pixels = (unsigned long long)rows * columns;
    const Change &change = changes[image];
    if (!change.box.rows)
        return;
    int mean = (int)((2 * sums[image] + n_pixels) / (2 * n_pixels)); // to nearest
    crops += (image * rows + blockIdx.x) * columns * 3;
    for (int column = threadIdx.x; column < columns; column += blockDim.x) {
        Rgb pixel = jittered(crops + column * 3, change, N_JITTERS, mean);
        crops[column * 3] = pixel.red;
        crops[column * 3 + 1] = pixel.green;
        crops[column * 3 + 2] = pixel.blue;
    }
}

extern "C" __global__ void augment_erase(uint8 *crops, const Change *changes, int rows, int columns, int colors)
{
    unsigned long long image = blockIdx.y;
    const Change &change = changes[image];
    if (!change.box.rows)
        return;
    crops += (image * rows + blockIdx.x) * columns * colors;
    for (int number = threadIdx.x; number < columns * colors; number += blockDim.x)
        if (holds(change.erased, blockIdx.x, number / colors))
            crops[number] = change.color[number % colors];
}

extern "C" __global__ void augment_mix(const uint8 *crops, const Pair *pairs, uint8 *mixed, int rows, int columns, int colors)
{
    unsigned long long image = blockIdx.y, line = columns * colors;
    const Pair pair = pairs[image];
    const uint8 *own = crops + ((unsigned long long)pair.own * rows + blockIdx.x) * line;
    const uint8 *partner = crops + ((unsigned long long)pair.partner * rows + blockIdx.x) * line;
    mixed += (image * rows + blockIdx.x) * line;
    for (int number = threadIdx.x; number < columns * colors; number += blockDim.x) {
        int blended = (own[number] * pair.weight + partner[number] * (256 - pair.weight) + 128) >> 8;
        bool is_replaced = holds(pair.box, blockIdx.x, number / colors);
        mixed[number] = is_replaced ? partner[number] : pair.box.rows ? own[number] : blended;
    }
}

// The last step. The output has the values of BLOCK x BLOCK pixels one after the other, as channels: (batch, row of blocks, column of blocks,
// row in the block, column in the block, channel). With BLOCK 1 that is the image; 2 and 4 are for a first convolution by
// space-to-depth (lockstep/network/convolution.py). The blocks begin `padding` rows and columns before the image; values
// outside the image are zero, like a convolution's padding.
//
// One block of threads writes one row of blocks (blockIdx.x), `n_columns` of them, of one image (blockIdx.y). Neighbouring
// threads write neighbouring numbers, so that a warp's writes coalesce. The mean is subtracted at the pixel's place in the
// whole image, before mirroring. `shifts` has a number for each channel (color) of an image, which is zero for unshifted
// colours. In float32 the result has the host's bits; bfloat16 is that, rounded to nearest even.

struct Crop {
    int row, column, mirror; // first row and column in the image; whether to mirror
};

template <unsigned int BLOCK, unsigned int COLORS, typename T>
__device__ inline void augment(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, T *out, int height, int width,
    int rows, int columns, unsigned int n_columns, int padding)
{
    enum { LINE = BLOCK * COLORS, WHOLE = BLOCK * LINE }; // numbers in a block's row, and in a block
    unsigned long long image = blockIdx.y;
    Crop crop = crops[image];
    images += image * height * width * COLORS;
    shifts += image * COLORS;
    out += (image * gridDim.x + blockIdx.x) * n_columns * WHOLE;
    for (unsigned int number = threadIdx.x; number < n_columns * WHOLE; number += blockDim.x) {
        unsigned int inside = number % WHOLE, color = number % COLORS; // division by constants compiles to multiplication
        int row = (int)(blockIdx.x * BLOCK + inside / LINE) - padding;
        int column = (int)(number / WHOLE * BLOCK + inside % LINE / COLORS) - padding;
        float value = 0;
        if (row >= 0 && row < rows && column >= 0 && column < columns) {
            if (crop.mirror)
                column = columns - 1 - column;
            int from = ((crop.row + row) * width + crop.column + column) * (int)COLORS + (int)color;
            value = (float)images[from] - mean[from] + shifts[color];
        }
        narrow(out + number, value);
    }
}

// Blocks of several pixels have three colors, and are square (lockstep/backends/cuda.py).
#define AUGMENT(BLOCK, COLORS) \
    augment<BLOCK, COLORS>(images, crops, shifts, mean, out, height, width, rows, columns, n_columns, padding)

template <typename T>
__device__ inline void crop_and_subtract(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, T *out, int height, int width,
    int rows, int columns, int n_columns, int colors, int block, int padding)
{
    if (block == 4)
        AUGMENT(4, 3);
    else if (block == 2)
        AUGMENT(2, 3);
    else if (colors == 1)
        AUGMENT(1, 1);
    else if (colors == 2)
        AUGMENT(1, 2);
    else if (colors == 4)
        AUGMENT(1, 4);
    else
        AUGMENT(1, 3);
}

extern "C" __global__ void crop_and_subtract_float32(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, float *out, int height, int width,
    int rows, int columns, int n_columns, int colors, int block, int padding)
{
    crop_and_subtract(images, crops, shifts, mean, out, height, width, rows, columns, n_columns, colors, block, padding);
}

extern "C" __global__ void crop_and_subtract_bfloat16(
    const uint8 *images, const Crop *crops, const float *shifts, const float *mean, bfloat16 *out, int height, int width,
    int rows, int columns, int n_columns, int colors, int block, int padding)
{
    crop_and_subtract(images, crops, shifts, mean, out, height, width, rows, columns, n_columns, colors, block, padding);
}
