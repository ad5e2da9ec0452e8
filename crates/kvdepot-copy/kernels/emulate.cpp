// Runs the copy kernel's own source on a processor, a thread after the other, over random descriptors: shows wrong
// indices, heads and tails, and accesses out of bounds or out of alignment. It says nothing about time or order.
//
// g++ -std=c++17 -O1 -fsanitize=address,undefined emulate.cpp && ./a.out

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define KVDEPOT_EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint4 {
    unsigned x, y, z, w;
};
struct Dimension {
    unsigned x;
};
static Dimension threadIdx, blockIdx, gridDim, blockDim;

static void check_alignment(const char *address) {
    if (reinterpret_cast<uintptr_t>(address) % sizeof(uint4) != 0) {
        fprintf(stderr, "a vector at an address that is no multiple of 16\n");
        exit(1);
    }
}

static uint4 load16(const char *from) {
    check_alignment(from);
    uint4 value;
    memcpy(&value, from, sizeof value);
    return value;
}

static void store16(char *to, uint4 value) {
    check_alignment(to);
    memcpy(to, &value, sizeof value);
}

#include "kvcopy.cu"

static const unsigned CASES = 1000, TILE = 16 << 10, SLACK = 64;

static unsigned length(std::mt19937 &random) {
    switch (random() % 6) {
    case 0:
        return random() % 20;
    case 1:
        return TILE;
    case 2:
        return random() % (TILE + 1);
    case 3:
        return 16 * (random() % (TILE / 16 + 1));
    case 4:
        return 4096 + random() % 40;
    default:
        return random() % 600;
    }
}

static bool copies(unsigned seed) {
    std::mt19937 random(seed);
    std::vector<Descriptor> descriptors(1 + random() % 70);
    size_t room = SLACK;
    for (Descriptor &d : descriptors) {
        d.from = room + random() % 16;
        // Most layouts lie the same way on both sides.
        d.to = random() % 3 ? d.from : room + random() % 16;
        d.len = length(random);
        room += (d.len + SLACK) / 16 * 16;
    }
    std::vector<char> from(room + SLACK), to(room + SLACK, 0x55);
    for (char &byte : from)
        byte = static_cast<char>(random());
    std::vector<char> wanted = to;
    // Vectors begin where `new` says, at multiples of 16.
    for (Descriptor &d : descriptors) {
        memcpy(&wanted[d.to], &from[d.from], d.len);
        d.from += reinterpret_cast<uintptr_t>(from.data());
        d.to += reinterpret_cast<uintptr_t>(to.data());
    }
    gridDim.x = 1 + random() % 3;
    blockDim.x = random() % 2 ? 1024 : 256;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            kvdepot_copy(descriptors.data(), static_cast<u32>(descriptors.size()));
    return to == wanted;
}

int main() {
    for (unsigned seed = 0; seed < CASES; seed++)
        if (!copies(seed)) {
            fprintf(stderr, "wrong bytes, seed %u\n", seed);
            return 1;
        }
    printf("the kernel's source copies %u random batches rightly\n", CASES);
    return 0;
}
