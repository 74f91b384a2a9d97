// The part of CUDA that cache/kernels.cu uses, for the host's C++ compiler: include this first.
//
// A launch is a loop over all threads of all blocks in an order that a seed shuffles. That models a
// GPU faithfully for kernels whose threads do not wait for each other; barriers and shared memory
// are left out on purpose, so that a kernel that uses them does not compile.

#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __builtin_assume(...)

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

struct KernelTrap {};

[[noreturn]] inline void __trap() { throw KernelTrap{}; }

inline unsigned atomicOr(unsigned* address, unsigned value) {
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

constexpr int NUM_ARGUMENTS = 16;

template <std::size_t... INDEX>
inline void call(void* kernel, const std::int64_t* arguments, std::index_sequence<INDEX...>) {
    // Integers and pointers of 64 bits are passed alike.
    using Word = std::int64_t;
    reinterpret_cast<void (*)(decltype((void)INDEX, Word{})...)>(kernel)(arguments[INDEX]...);
}

// Run `kernel`; returns 1 if a thread has trapped, and then the rest was not run.
extern "C" int shim_launch(
    void* kernel, std::int64_t grid, std::int64_t block, const std::int64_t* arguments,
    std::uint64_t seed
) {
    std::vector<std::uint64_t> threads(grid * block);
    std::iota(threads.begin(), threads.end(), 0);
    std::mt19937_64 random(seed);
    for (std::size_t left = threads.size(); left > 1; --left) {
        std::swap(threads[left - 1], threads[random() % left]);
    }
    gridDim = {static_cast<unsigned>(grid), 1, 1};
    blockDim = {static_cast<unsigned>(block), 1, 1};
    try {
        for (const std::uint64_t thread : threads) {
            blockIdx = {static_cast<unsigned>(thread / block), 0, 0};
            threadIdx = {static_cast<unsigned>(thread % block), 0, 0};
            call(kernel, arguments, std::make_index_sequence<NUM_ARGUMENTS>{});
        }
    } catch (const KernelTrap&) {
        return 1;
    }
    return 0;
}
