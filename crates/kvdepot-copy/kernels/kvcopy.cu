// Copies many ranges between device memory and mapped host memory, with few blocks of threads.
//
// Compiled to PTX by make_ptx.py: no headers, no device at build time. A warp takes one descriptor at a time; what is in
// flight is what hides the way to host memory, so each lane has eight 16-byte loads under way before it stores.

typedef unsigned long long u64;
typedef unsigned int u32;

// src/cuda/kernel.rs has the same. `len` is at most its TILE_BYTES.
struct __align__(32) Descriptor {
    u64 from, to, len, unused;
};

enum : u32 { LANES = 32, UNROLL = 8, VECTOR = 16, STEP = LANES * VECTOR * UNROLL };

#ifndef KVDEPOT_EMULATED // by emulate.cpp, which has its own
static __device__ __forceinline__ uint4 load16(const char *from) {
    uint4 value;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}

static __device__ __forceinline__ void store16(char *to, uint4 value) {
    asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}
#endif

// Both sides are aligned to a vector.
static __device__ __forceinline__ void copy_vectors(const char *from, char *to, u32 len, u32 lane) {
    u32 at = 0;
    for (; at + STEP <= len; at += STEP) {
        uint4 value[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++)
            value[i] = load16(from + at + (i * LANES + lane) * VECTOR);
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++)
            store16(to + at + (i * LANES + lane) * VECTOR, value[i]);
    }
    for (u32 here = at + lane * VECTOR; here + VECTOR <= len; here += LANES * VECTOR)
        store16(to + here, load16(from + here));
    for (u32 here = (len & ~(VECTOR - 1u)) + lane; here < len; here += LANES)
        to[here] = from[here];
}

static __device__ __forceinline__ void copy_range(const char *from, char *to, u32 len, u32 lane) {
    const u32 apart = (u32)((u64)from ^ (u64)to) & (VECTOR - 1u);
    if (apart != 0) {
        // No vector lies the same way on both sides. Layouts of real models do not come here.
        for (u32 here = lane; here < len; here += LANES)
            to[here] = from[here];
        return;
    }
    const u32 gap = (VECTOR - ((u32)(u64)from & (VECTOR - 1u))) & (VECTOR - 1u);
    const u32 head = gap < len ? gap : len;
    if (lane < head)
        to[lane] = from[lane];
    copy_vectors(from + head, to + head, len - head, lane);
}

// Blocks of 256 threads fit beside an engine's own. No more registers than let two of them share a multiprocessor with it.
extern "C" __global__ void __launch_bounds__(256, 2) kvdepot_copy(const Descriptor *descriptors, u32 count) {
    const u32 lane = threadIdx.x % LANES;
    const u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    const u32 warps = gridDim.x * blockDim.x / LANES;
    for (u32 index = warp; index < count; index += warps) {
        const Descriptor d = descriptors[index];
        copy_range((const char *)d.from, (char *)d.to, (u32)d.len, lane);
    }
}

// Reads and writes device memory as decoding does, bound by its bandwidth; the content does not change. For the benchmark
// of what copies cost beside it.
extern "C" __global__ void __launch_bounds__(1024) kvdepot_burn(u32 *words, u64 count, u32 rounds) {
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x;
    const u64 step = gridDim.x * (u64)blockDim.x;
    for (u32 round = 0; round < rounds; round++)
        for (u64 at = first; at < count; at += step) {
            volatile u32 *word = words + at;
            *word = *word;
        }
}
