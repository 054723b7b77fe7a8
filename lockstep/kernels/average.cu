// Averages this rank's shard of every arena, and writes the mean into all of them (lockstep/exchange/__init__.py).
//
// One thread takes four neighbouring floats: reads them from every arena in rank order, adds, divides, writes. The
// order of additions and the division are those of the host's exchange, so both give the same bits. Peers' arenas are
// read and written through pointers that CUDA IPC has opened.

#define MOST_ARENAS 16

struct Arenas {
    float4 *of[MOST_ARENAS];
};

// first, last: elements of the shard in units of four floats; the arena's length is a multiple of 16 floats.
extern "C" __global__ void average(Arenas arenas, int n_arenas, unsigned long long first, unsigned long long last)
{
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    float divisor = (float)n_arenas;
    for (unsigned long long i = first + blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < last; i += stride) {
        float4 sum = arenas.of[0][i];
        for (int rank = 1; rank < n_arenas; rank++) {
            float4 part = arenas.of[rank][i];
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        float4 mean = {sum.x / divisor, sum.y / divisor, sum.z / divisor, sum.w / divisor};
        for (int rank = 0; rank < n_arenas; rank++)
            arenas.of[rank][i] = mean;
    }
}
