/* A stand-in for the CUDA runtime, on which UCM's store runs without a GPU: device memory is host memory, a stream is a
 * thread that copies in order, and pinned memory is touched memory. Copies on the default stream are made by the caller.
 * Only what UCM's wheel links to is here.
 */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };

typedef struct work {
    struct work *next;
    void *target;
    const void *source;
    size_t bytes;
    void (*call)(void *stream, int status, void *argument);
    void *argument;
} work_t;

typedef struct stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more, idle;
    work_t *first, **last;
    uint64_t submitted, done;
    int ending;
} stream_t;

static void perform(stream_t *stream, const work_t *work) {
    if (work->bytes) memcpy(work->target, work->source, work->bytes);
    if (work->call) work->call(stream, SUCCESS, work->argument);
}

static void *run(void *argument) {
    stream_t *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (!stream->first && !stream->ending) pthread_cond_wait(&stream->more, &stream->lock);
        work_t *taken = stream->first;
        if (!taken) break;
        stream->first = NULL;
        stream->last = &stream->first;
        pthread_mutex_unlock(&stream->lock);
        uint64_t count = 0;
        while (taken) {
            work_t *next = taken->next;
            perform(stream, taken);
            free(taken);
            taken = next;
            count++;
        }
        pthread_mutex_lock(&stream->lock);
        stream->done += count;
        pthread_cond_broadcast(&stream->idle);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static int submit(stream_t *stream, work_t work) {
    if (!stream) {
        perform(NULL, &work);
        return SUCCESS;
    }
    work_t *kept = malloc(sizeof *kept);
    if (!kept) return OUT_OF_MEMORY;
    *kept = work;
    kept->next = NULL;
    pthread_mutex_lock(&stream->lock);
    int was_empty = stream->first == NULL;
    *stream->last = kept;
    stream->last = &kept->next;
    stream->submitted++;
    if (was_empty) pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

/* Devices */

int cudaSetDevice(int device) { return device == 0 ? SUCCESS : INVALID_VALUE; }
int cudaDeviceReset(void) { return SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
const char *cudaGetErrorString(int error) { return error ? "an error of the stand-in for CUDA" : "no error"; }

/* Memory */

static int touched(void **pointer, size_t bytes) {
    /* The size is kept in front, at a distance that keeps pages and direct I/O aligned. */
    const size_t front = 2 << 20, align = 2 << 20;
    size_t whole = (front + bytes + align - 1) / align * align;
    char *base;
    if (posix_memalign((void **)&base, align, whole)) return OUT_OF_MEMORY;
    madvise(base, whole, MADV_HUGEPAGE);
    memset(base, 0, whole);
    *pointer = base + front;
    ((void **)(base + front))[-1] = base;
    return SUCCESS;
}

static int released(void *pointer) {
    if (pointer) free(((void **)pointer)[-1]);
    return SUCCESS;
}

int cudaMalloc(void **pointer, size_t bytes) { return touched(pointer, bytes); }
int cudaFree(void *pointer) { return released(pointer); }
int cudaMallocHost(void **pointer, size_t bytes) { return touched(pointer, bytes); }
int cudaFreeHost(void *pointer) { return released(pointer); }
int cudaHostUnregister(void *pointer) { (void)pointer; return SUCCESS; }

int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    madvise(pointer, bytes, MADV_POPULATE_WRITE);
    return SUCCESS;
}

int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    (void)flags;
    *device = host;
    return SUCCESS;
}

int cudaMemcpy(void *target, const void *source, size_t bytes, int kind) {
    (void)kind;
    memcpy(target, source, bytes);
    return SUCCESS;
}

int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, stream_t *stream) {
    (void)kind;
    return submit(stream, (work_t){.target = target, .source = source, .bytes = bytes});
}

int cudaMemset(void *target, int value, size_t bytes) {
    memset(target, value, bytes);
    return SUCCESS;
}

/* Streams */

int cudaStreamCreate(stream_t **stream) {
    stream_t *made = calloc(1, sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->more, NULL);
    pthread_cond_init(&made->idle, NULL);
    made->last = &made->first;
    if (pthread_create(&made->thread, NULL, run, made)) {
        free(made);
        return OUT_OF_MEMORY;
    }
    *stream = made;
    return SUCCESS;
}

int cudaStreamCreateWithFlags(stream_t **stream, unsigned flags) { (void)flags; return cudaStreamCreate(stream); }

int cudaStreamSynchronize(stream_t *stream) {
    if (!stream) return SUCCESS;
    pthread_mutex_lock(&stream->lock);
    uint64_t wanted = stream->submitted;
    while (stream->done < wanted) pthread_cond_wait(&stream->idle, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
    return SUCCESS;
}

int cudaStreamDestroy(stream_t *stream) {
    if (!stream) return SUCCESS;
    pthread_mutex_lock(&stream->lock);
    stream->ending = 1;
    pthread_cond_signal(&stream->more);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    free(stream);
    return SUCCESS;
}

int cudaStreamAddCallback(stream_t *stream, void (*call)(void *, int, void *), void *argument, unsigned flags) {
    (void)flags;
    return submit(stream, (work_t){.call = call, .argument = argument});
}

/* Events come from the engine, and there is none; kernels are those of stores that are not measured. */

int cudaStreamWaitEvent(stream_t *stream, void *event, unsigned flags) {
    (void)stream, (void)event, (void)flags;
    return NOT_SUPPORTED;
}

int cudaEventQuery(void *event) { (void)event; return NOT_SUPPORTED; }
int cudaEventSynchronize(void *event) { (void)event; return NOT_SUPPORTED; }
int cudaLaunchKernel(void) { return NOT_SUPPORTED; }
int __cudaPushCallConfiguration(void) { return NOT_SUPPORTED; }
int __cudaPopCallConfiguration(void) { return NOT_SUPPORTED; }
void **__cudaRegisterFatBinary(void *binary) { static void *handle; (void)binary; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
