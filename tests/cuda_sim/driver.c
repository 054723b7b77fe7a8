// A stand-in for libcuda.so.1, for tests on machines without a GPU: what Lockstep uses of the CUDA driver, on host memory.
//
// Device memory is a file that several processes map, named in CUDA_SIM_FOLDER, so that an IPC handle can open it.
// Streams are threads that really run behind the host's back, each with a queue. Events are counters in shared memory, so that
// a stream of one process can wait for a stream of another. Nothing measured on it says anything about a GPU.
//
//   CUDA_SIM_FOLDER   where memory and events lie (needed)       CUDA_SIM_DEVICES   how many devices (2)
//   CUDA_SIM_MEMORY   bytes per device and process (1 GiB)       CUDA_SIM_DELAY     longest pause before an operation, us (0)
//   CUDA_SIM_HANGS    1: whoever begins to use it waits for ever
//   CUDA_SIM_LOCKABLE bytes of host memory that can be page-locked at once (all)
//
// Faults between devices, as lists of pairs like 0-1,1-0 (who reaches - whose memory; 0-0 for two processes on one device):
//   CUDA_SIM_NO_PEER  the driver says that there is no access      CUDA_SIM_LOST      writes never arrive
//   CUDA_SIM_NO_OPEN  IPC handles can't be opened
//   CUDA_SIM_GARBLED  a kernel's writes arrive with one bit turned over
//
//   CUDA_SIM_NO_IPC   1: nothing can be shared, as where the kernel is gVisor
//   CUDA_SIM_SHM      where the files of interprocess events lie (/dev/shm)
//
// Rules of the real driver that are easily broken without notice are made to hurt here: freed memory is overwritten before it
// goes, whoever still has it open; a process can't open its own handle; freeing waits for all streams of the device; a queue that
// is full blocks; elapsed times need events that are timed and done; memory of another device must have been opened here, or
// access to its peer enabled; memory is page-locked once; an interprocess event is a file in /dev/shm that outlives a killed process;
// the default stream and those made without CU_STREAM_NON_BLOCKING wait for each other, and for no others.

#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST_DEVICES 16
#define POISON 0xEE
#define MOST_QUEUED 1024 // launches, before the host waits for the device

struct CUctx_st {
    int device;
};

struct allocation {
    struct allocation *next;
    void *pointer;
    size_t bytes;
    int device, owned, opened, garbled;
    char name[48];
};

struct shared_event {
    _Atomic unsigned long long issued, done, nanoseconds;
};

struct CUevent_st {
    struct shared_event *shared;
    int owned, timed;
    char name[48]; // of its file, where it is an interprocess event
};

struct locked {
    struct locked *next;
    char *first;
    size_t bytes;
};

struct CUmod_st {
    int (*launch)(const char *, const char *, unsigned, unsigned, unsigned);
};

struct CUfunc_st {
    struct CUmod_st *module;
    char name[64];
};

struct operation {
    struct operation *next;
    enum { COPY, COPY_AND_FREE, FILL, KERNEL, RECORD, WAIT, FOLLOW } kind;
    void *to;
    const void *from;
    size_t bytes;
    unsigned char value;
    struct CUfunc_st *function;
    unsigned blocks, rows, threads;
    struct shared_event *event;
    struct progress *progress;
    unsigned long long number;
};

struct progress { // of a stream: operations that it was given, and that it has done; never freed, since others may wait
    _Atomic unsigned long long given, done;
};

struct CUstream_st {
    struct progress *progress;
    int is_default, blocking; // blocking: it and the default stream wait for each other
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct operation *first, *last;
    int busy, closing, queued, device;
    unsigned random;
    struct CUstream_st *next;
};

static struct CUctx_st contexts[MOST_DEVICES];
static struct CUstream_st *default_streams[MOST_DEVICES];
static struct CUstream_st *streams;
static struct allocation *allocations;
static struct locked *locked;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic unsigned counter;
static _Thread_local CUcontext stack[64];
static _Thread_local int depth;

static long setting(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

static int n_devices(void)
{
    long n = setting("CUDA_SIM_DEVICES", 2);
    return n > MOST_DEVICES ? MOST_DEVICES : (int)n;
}

static int has_fault(const char *kind, int device, int owner)
{
    char pair[16];
    const char *pairs = getenv(kind);
    snprintf(pair, sizeof pair, "%d-%d", device, owner);
    return pairs && strstr(pairs, pair);
}

static int may_access[MOST_DEVICES][MOST_DEVICES]; // enabled by whom, for whose memory

static CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

// ---- shared files -------------------------------------------------------------------------------------------------

static void new_name(char *name, const char *kind) { snprintf(name, 48, "%s-%d-%u", kind, getpid(), ++counter); }

static const char *folder_of(const char *name)
{
    const char *shm = getenv("CUDA_SIM_SHM");
    return strncmp(name, "cuda.shm.", 9) ? getenv("CUDA_SIM_FOLDER") : shm ? shm : "/dev/shm";
}

static void *map_file(const char *name, size_t bytes, int create, int flags)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder_of(name), name);
    int file = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);
    if (file < 0)
        return NULL;
    void *pointer = create && ftruncate(file, bytes) ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
    close(file);
    return pointer == MAP_FAILED ? NULL : pointer;
}

static void remove_file(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder_of(name), name);
    unlink(path);
}

// ---- streams ------------------------------------------------------------------------------------------------------

// What a broken link makes of what a kernel has written: one bit in the middle of the peer's memory is turned over.
static void garble(void)
{
    pthread_mutex_lock(&lock);
    for (struct allocation *at = allocations; at; at = at->next)
        if (at->garbled)
            ((unsigned char *)at->pointer)[at->bytes / 2] ^= 16;
    pthread_mutex_unlock(&lock);
}

static void perform(struct CUstream_st *stream, struct operation *op)
{
    long delay = op->kind == FOLLOW ? 0 : setting("CUDA_SIM_DELAY", 0);
    if (delay)
        usleep(rand_r(&stream->random) % delay);
    switch (op->kind) {
    case COPY:
        memmove(op->to, op->from, op->bytes);
        break;
    case COPY_AND_FREE:
        memcpy(op->to, op->from, op->bytes);
        free((void *)op->from);
        break;
    case FILL:
        memset(op->to, op->value, op->bytes);
        break;
    case KERNEL:
        if (op->function->module->launch(op->function->name, op->from, op->blocks, op->rows, op->threads))
            abort();
        free((void *)op->from);
        garble();
        break;
    case RECORD: {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        op->event->nanoseconds = now.tv_sec * 1000000000ull + now.tv_nsec;
        op->event->done = op->number;
        break;
    }
    case WAIT:
        while (op->event->done < op->number)
            usleep(20);
        break;
    case FOLLOW:
        while (op->progress->done < op->number)
            usleep(20);
    }
}

static void *work(void *argument)
{
    struct CUstream_st *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->closing)
            pthread_cond_wait(&stream->changed, &stream->lock);
        if (!stream->first)
            break;
        struct operation *op = stream->first;
        stream->first = op->next;
        stream->busy = 1;
        pthread_mutex_unlock(&stream->lock);
        perform(stream, op);
        free(op);
        pthread_mutex_lock(&stream->lock);
        stream->busy = 0;
        stream->queued--;
        stream->progress->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static struct CUstream_st *new_stream(int is_default, int blocking)
{
    struct CUstream_st *stream = calloc(1, sizeof *stream);
    stream->progress = calloc(1, sizeof *stream->progress);
    stream->is_default = is_default;
    stream->blocking = blocking;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->random = getpid() * 31 + ++counter;
    stream->device = current()->device;
    stream->next = streams; // under `lock`
    streams = stream;
    pthread_create(&stream->thread, NULL, work, stream);
    return stream;
}

static struct CUstream_st *stream_of(CUstream given)
{
    if (given && given != CU_STREAM_LEGACY && given != CU_STREAM_PER_THREAD)
        return given;
    int device = current()->device;
    pthread_mutex_lock(&lock);
    if (!default_streams[device])
        default_streams[device] = new_stream(1, 0);
    pthread_mutex_unlock(&lock);
    return default_streams[device];
}

static void append(struct CUstream_st *stream, struct operation op)
{
    struct operation *copy = malloc(sizeof op);
    *copy = op;
    copy->next = NULL;
    pthread_mutex_lock(&stream->lock);
    stream->queued++;
    stream->progress->given++;
    if (stream->first)
        stream->last->next = copy;
    else
        stream->first = copy;
    stream->last = copy;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

static void follow(struct CUstream_st *stream, struct CUstream_st *other)
{
    if (other->progress->done < other->progress->given)
        append(stream, (struct operation){.kind = FOLLOW, .progress = other->progress, .number = other->progress->given});
}

// What a stream is given waits for what it must not overtake: that of the default stream, or of all blocking ones.
static void follow_others(struct CUstream_st *stream) // under `lock`, so that no two can wait for each other
{
    if (stream->blocking && default_streams[stream->device])
        follow(stream, default_streams[stream->device]);
    for (struct CUstream_st *other = streams; stream->is_default && other; other = other->next)
        if (other->blocking && other->device == stream->device)
            follow(stream, other);
}

static CUresult enqueue(CUstream given, struct operation op)
{
    if (!current())
        return CUDA_ERROR_INVALID_CONTEXT;
    struct CUstream_st *stream = stream_of(given);
    pthread_mutex_lock(&stream->lock);
    while (stream->queued >= MOST_QUEUED)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    pthread_mutex_lock(&lock);
    follow_others(stream);
    append(stream, op);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult drain(struct CUstream_st *stream)
{
    pthread_mutex_lock(&stream->lock);
    while (stream->first || stream->busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags)
{
    if (!current() || flags & ~CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    *stream = new_stream(0, !(flags & CU_STREAM_NON_BLOCKING));
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

// As freeing memory does: whatever the device was asked for is done first, in all of its streams.
static void drain_all(int device)
{
    pthread_mutex_lock(&lock);
    struct CUstream_st *stream = streams;
    pthread_mutex_unlock(&lock);
    for (; stream; stream = stream->next)
        if (stream->device == device)
            drain(stream);
}

CUresult cuStreamDestroy(CUstream stream)
{
    pthread_mutex_lock(&stream->lock);
    stream->closing = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&lock);
    struct CUstream_st **at = &streams;
    while (*at != stream)
        at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&lock);
    free(stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) { return drain(stream_of(stream)); }

CUresult cuStreamQuery(CUstream given)
{
    struct CUstream_st *stream = stream_of(given);
    pthread_mutex_lock(&stream->lock);
    int busy = stream->first || stream->busy;
    pthread_mutex_unlock(&stream->lock);
    return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags)
{
    (void)flags;
    return enqueue(stream, (struct operation){.kind = WAIT, .event = event->shared, .number = event->shared->issued});
}

// ---- events -------------------------------------------------------------------------------------------------------

CUresult cuEventCreate(CUevent *event, unsigned flags)
{
    if ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_VALUE;
    struct CUevent_st *made = calloc(1, sizeof *made);
    made->owned = 1;
    made->timed = !(flags & CU_EVENT_DISABLE_TIMING);
    *event = made;
    if (!(flags & CU_EVENT_INTERPROCESS))
        return made->shared = calloc(1, sizeof *made->shared), CUDA_SUCCESS;
    if (setting("CUDA_SIM_NO_IPC", 0))
        return free(made), CUDA_ERROR_NOT_SUPPORTED;
    snprintf(made->name, sizeof made->name, "cuda.shm.%x.%x.%x", getuid(), getpid(), ++counter);
    remove_file(made->name); // of a killed process, whose number this one has
    made->shared = map_file(made->name, sizeof *made->shared, 1, MAP_SHARED);
    return made->shared ? CUDA_SUCCESS : (free(made), CUDA_ERROR_OPERATING_SYSTEM);
}

CUresult cuEventDestroy(CUevent event)
{
    // what is in a stream may still need it: it stays mapped
    if (event->owned && event->name[0])
        remove_file(event->name);
    free(event);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return enqueue(stream, (struct operation){.kind = RECORD, .event = event->shared, .number = ++event->shared->issued});
}

CUresult cuEventQuery(CUevent event)
{
    return event->shared->done >= event->shared->issued ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event)
{
    unsigned long long number = event->shared->issued;
    while (event->shared->done < number)
        usleep(20);
    return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    if (!start->timed || !end->timed || !start->shared->issued || !end->shared->issued)
        return CUDA_ERROR_INVALID_HANDLE;
    if (cuEventQuery(start) || cuEventQuery(end))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (end->shared->nanoseconds - start->shared->nanoseconds) / 1e6f;
    return CUDA_SUCCESS;
}

CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event)
{
    if (!event->name[0])
        return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, event->name, sizeof event->name);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle)
{
    struct CUevent_st *made = calloc(1, sizeof *made);
    made->shared = map_file(handle.reserved, sizeof *made->shared, 0, MAP_SHARED);
    *event = made;
    return made->shared ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// ---- memory -------------------------------------------------------------------------------------------------------

static CUresult add(CUdeviceptr *pointer, const char *name, size_t bytes, int owned, int lost)
{
    struct allocation *made = calloc(1, sizeof *made);
    memcpy(made->name, name, sizeof made->name);
    made->pointer = map_file(name, bytes, owned, lost ? MAP_PRIVATE : MAP_SHARED); // lost: on a copy of one's own
    made->bytes = bytes;
    made->owned = owned;
    made->opened = 1;
    made->device = current()->device;
    if (!made->pointer)
        return free(made), owned ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
    made->next = allocations;
    allocations = made;
    *pointer = (CUdeviceptr)made->pointer;
    return CUDA_SUCCESS;
}

// Whether an address lies in this process's memory of another device, or in none where it must lie in some.
static int is_foreign(const void *address, int device, int must)
{
    int known = 0, here = 0;
    pthread_mutex_lock(&lock);
    for (struct allocation *at = allocations; at; at = at->next)
        if ((char *)address >= (char *)at->pointer && (char *)address < (char *)at->pointer + at->bytes)
            known = 1, here |= at->device == device || may_access[device][at->device];
    pthread_mutex_unlock(&lock);
    return known ? !here : must;
}

static struct allocation **find(CUdeviceptr pointer)
{
    struct allocation **at = &allocations;
    while (*at && (CUdeviceptr)(*at)->pointer != pointer)
        at = &(*at)->next;
    return at;
}

static size_t used(int device)
{
    size_t bytes = 0;
    for (struct allocation *at = allocations; at; at = at->next)
        if (at->owned && at->device == device)
            bytes += at->bytes;
    return bytes;
}

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t bytes)
{
    char name[48] = "";
    if (!current())
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    new_name(name, "memory");
    int fits = used(current()->device) + bytes <= (size_t)setting("CUDA_SIM_MEMORY", 1l << 30);
    CUresult result = fits ? add(pointer, name, bytes, 1, 0) : CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&lock);
    if (result == CUDA_SUCCESS)
        memset((void *)*pointer, POISON, bytes); // nobody may count on zeros
    return result;
}

static CUresult release(CUdeviceptr pointer, int owned)
{
    pthread_mutex_lock(&lock);
    struct allocation **at = find(pointer), *found = *at;
    if (!found || found->owned != owned) {
        pthread_mutex_unlock(&lock);
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (!owned && --found->opened) {
        pthread_mutex_unlock(&lock);
        return CUDA_SUCCESS;
    }
    *at = found->next;
    pthread_mutex_unlock(&lock);
    if (owned) {
        memset(found->pointer, POISON, found->bytes);
        remove_file(found->name);
    }
    munmap(found->pointer, found->bytes);
    free(found);
    return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr pointer)
{
    if (current())
        drain_all(current()->device);
    return release(pointer, 1);
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) { return release(pointer, 0); }

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    struct allocation *found = *find(pointer);
    if (!found || !found->owned)
        return CUDA_ERROR_INVALID_VALUE;
    if (setting("CUDA_SIM_NO_IPC", 0) || found->bytes % (2 << 20))
        return CUDA_ERROR_NOT_SUPPORTED;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, found->name, sizeof found->name);
    memcpy(handle->reserved + 48, &found->bytes, sizeof found->bytes);
    memcpy(handle->reserved + 56, &found->device, sizeof found->device);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
    size_t bytes;
    int owner = 0, device;
    (void)flags;
    memcpy(&device, handle.reserved + 56, sizeof device);
    memcpy(&bytes, handle.reserved + 48, sizeof bytes);
    sscanf(handle.reserved, "memory-%d-", &owner);
    if (!current() || owner == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (has_fault("CUDA_SIM_NO_PEER", current()->device, device))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    if (has_fault("CUDA_SIM_NO_OPEN", current()->device, device))
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_mutex_lock(&lock);
    CUresult result = CUDA_SUCCESS;
    struct allocation *at = allocations;
    while (at && strcmp(at->name, handle.reserved))
        at = at->next;
    if (at)
        at->opened++, *pointer = (CUdeviceptr)at->pointer;
    else
        result = add(pointer, handle.reserved, bytes, 0, has_fault("CUDA_SIM_LOST", current()->device, device));
    if (result == CUDA_SUCCESS)
        (*find(*pointer))->garbled = has_fault("CUDA_SIM_GARBLED", current()->device, device);
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuMemGetInfo(size_t *available, size_t *total)
{
    *total = setting("CUDA_SIM_MEMORY", 1l << 30);
    *available = *total - used(current()->device);
    return CUDA_SUCCESS;
}

// ---- page-locked host memory --------------------------------------------------------------------------------------

CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
    (void)flags;
    return posix_memalign(pointer, 4096, bytes) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void *pointer) { return free(pointer), CUDA_SUCCESS; }

CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned flags)
{
    (void)flags;
    if (setting("CUDA_SIM_LOCKABLE", 1l << 40) < (long)bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if ((size_t)pointer % 4096)
        return CUDA_ERROR_INVALID_VALUE;
    for (struct locked *at = locked; at; at = at->next)
        if ((char *)pointer < at->first + at->bytes && at->first < (char *)pointer + bytes)
            return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    struct locked *made = malloc(sizeof *made);
    *made = (struct locked){locked, pointer, bytes};
    locked = made;
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *pointer)
{
    for (struct locked **at = &locked; *at; at = &(*at)->next)
        if ((*at)->first == pointer) {
            struct locked *found = *at;
            *at = found->next;
            return free(found), CUDA_SUCCESS;
        }
    return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

// ---- copies -------------------------------------------------------------------------------------------------------

enum side { HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE };

static CUresult copy(enum side side, void *to, const void *from, size_t bytes, CUstream stream, int wait)
{
    if (!current())
        return CUDA_ERROR_INVALID_CONTEXT;
    int device = current()->device;
    if ((side != DEVICE_TO_HOST && is_foreign(to, device, 1)) || (side != HOST_TO_DEVICE && is_foreign(from, device, 1)))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = enqueue(stream, (struct operation){.kind = COPY, .to = to, .from = from, .bytes = bytes});
    return result || !wait ? result : drain(stream_of(stream));
}

#define DEVICE(pointer) ((void *)(pointer))

// As the real one with pageable memory: it returns when the bytes are in the driver's own memory, before they are on the device.
CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t n)
{
    if (!current() || is_foreign(DEVICE(to), current()->device, 1))
        return CUDA_ERROR_INVALID_VALUE;
    void *kept = malloc(n);
    memcpy(kept, from, n);
    return enqueue(0, (struct operation){.kind = COPY_AND_FREE, .to = DEVICE(to), .from = kept, .bytes = n});
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t n) { return copy(DEVICE_TO_HOST, to, DEVICE(from), n, 0, 1); }
CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t n) { return copy(DEVICE_TO_DEVICE, DEVICE(to), DEVICE(from), n, 0, 1); }
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t n, CUstream s) { return copy(HOST_TO_DEVICE, DEVICE(to), from, n, s, 0); }
CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t n, CUstream s) { return copy(DEVICE_TO_HOST, to, DEVICE(from), n, s, 0); }
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s)
{
    return copy(DEVICE_TO_DEVICE, DEVICE(to), DEVICE(from), n, s, 0);
}
CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext a, CUdeviceptr from, CUcontext b, size_t n)
{
    (void)a, (void)b;
    return copy(DEVICE_TO_DEVICE, DEVICE(to), DEVICE(from), n, 0, 1);
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext a, CUdeviceptr from, CUcontext b, size_t n, CUstream s)
{
    (void)a, (void)b;
    return copy(DEVICE_TO_DEVICE, DEVICE(to), DEVICE(from), n, s, 0);
}

// Like the real one, it does not wait for the device.
CUresult cuMemsetD8(CUdeviceptr to, unsigned char value, size_t n)
{
    if (!current() || is_foreign(DEVICE(to), current()->device, 1))
        return CUDA_ERROR_INVALID_VALUE;
    return enqueue(0, (struct operation){.kind = FILL, .to = DEVICE(to), .value = value, .bytes = n});
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream s)
{
    return enqueue(s, (struct operation){.kind = FILL, .to = DEVICE(to), .value = value, .bytes = n});
}

// ---- modules and kernels ------------------------------------------------------------------------------------------

// The image is the path of a library that tests/cuda_sim/build.py made of the kernels' source.
CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return CUDA_ERROR_FILE_NOT_FOUND;
    *module = calloc(1, sizeof **module);
    *(void **)&(*module)->launch = dlsym(library, "launch_kernel");
    return (*module)->launch ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

CUresult cuModuleUnload(CUmodule module) { return free(module), CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    static const char nothing[4096];
    if (module->launch(name, nothing, 0, 0, 0)) // no blocks: it only says whether it knows the name
        return CUDA_ERROR_NOT_FOUND;
    *function = calloc(1, sizeof **function);
    (*function)->module = module;
    snprintf((*function)->name, sizeof (*function)->name, "%s", name);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(
    CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
    CUstream stream, void **parameters, void **extra)
{
    (void)shared;
    if (gy > 65535 || gz != 1 || by != 1 || bz != 1 || bx > 1024 || parameters || !extra)
        return CUDA_ERROR_INVALID_VALUE;
    const void *packed = NULL;
    size_t bytes = 0;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2)
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            packed = extra[1];
        else
            bytes = *(size_t *)extra[1];
    for (size_t at = 0; current() && at + 8 <= bytes; at += 8)
        if (is_foreign(*(void **)((char *)packed + at), current()->device, 0))
            return CUDA_ERROR_ILLEGAL_ADDRESS;
    char *kept = malloc(bytes + 16);
    memcpy(kept, packed, bytes);
    return enqueue(stream, (struct operation){.kind = KERNEL, .function = function, .from = kept, .blocks = gx, .rows = gy, .threads = bx});
}

// PyCUDA still calls it, beside giving the shape to cuLaunchKernel. It fails in a thread without a context, such as autograd's
// before torch has launched a kernel there.
CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z)
{
    (void)function, (void)x, (void)y, (void)z;
    return current() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    (void)function;
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

// ---- devices and contexts -----------------------------------------------------------------------------------------

CUresult cuInit(unsigned flags)
{
    (void)flags;
    for (int device = 0; device < MOST_DEVICES; device++)
        contexts[device].device = device;
    while (setting("CUDA_SIM_HANGS", 0))
        pause();
    return getenv("CUDA_SIM_FOLDER") ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { return *count = n_devices(), CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int number)
{
    *device = number;
    return number >= 0 && number < n_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    snprintf(name, length, "simulated device %d", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: *value = 1; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    snprintf(text, length, "0000:%02X:00.0", device + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[0] = (char)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    unsigned place = 0;
    sscanf(text, "0000:%X:", &place);
    return cuDeviceGet(device, (int)place - 1);
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    (void)device;
    return *bytes = setting("CUDA_SIM_MEMORY", 1l << 30), CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    (void)device;
    return *major = 9, *minor = 0, CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    *can = device != peer && !has_fault("CUDA_SIM_NO_PEER", device, peer);
    return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
    if (!current() || flags || has_fault("CUDA_SIM_NO_PEER", current()->device, peer->device))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    int *enabled = &may_access[current()->device][peer->device];
    return (*enabled)++ ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return *context = &contexts[device], CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return (void)device, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent(CUcontext context) { return stack[depth++] = context, CUDA_SUCCESS; }

CUresult cuCtxPopCurrent(CUcontext *context)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext popped = stack[--depth];
    if (context)
        *context = popped;
    return CUDA_SUCCESS;
}

CUresult cuCtxDetach(CUcontext context) { return (void)context, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = current(), CUDA_SUCCESS; }

CUresult cuCtxSetCurrent(CUcontext context)
{
    depth = depth ? depth : 1;
    stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    if (!current())
        return CUDA_ERROR_INVALID_CONTEXT;
    return *device = current()->device, CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext context, unsigned *version) { return (void)context, *version = 13000, CUDA_SUCCESS; }
CUresult cuCtxSynchronize(void) { return drain(stream_of(NULL)); }

CUresult cuGetErrorName(CUresult error, const char **text)
{
    static _Thread_local char name[32];
    snprintf(name, sizeof name, "CUDA error %d", error);
    return *text = name, CUDA_SUCCESS;
}


CUresult cuGetErrorString(CUresult error, const char **text)
{
    if (error == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
        return *text = "peer access is already enabled", CUDA_SUCCESS;
    return cuGetErrorName(error, text);
}
