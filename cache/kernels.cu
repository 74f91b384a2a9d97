// The operations of a plan on the GPU: one launch does all reads, fills, spills and moves.
//
// A launch works on items: the output rows ("units") of all outputs, the free fills and the moves.
// A group of `lanes` threads of one warp does an item, each thread 16 bytes of a slot at a time.
// Groups need nothing from each other: no shared memory, no barrier, no shuffle. By the rules that
// `cache/plan.py` states, no two items touch the same bytes, so they run in any order.
//
// A read that names a fill does it and then reads what it has written, so that a missed row crosses
// the bus once. The first warps do the free fills and the moves, the others write units.
// `cache/kernel_launch.py` computes how many blocks that takes.
//
// Compile with --fmad=false: sums run left to right in float32, every product and sum rounded, so
// that results equal those of `cache/cpu_kernels.py` bit for bit. Nothing is included: this is
// compiled at start by NVRTC, which has no headers. With -DHOTSHELF_DEBUG the rules are checked.

#define DEVICE __device__ __forceinline__

using int64 = long long;

constexpr int BLOCK_THREADS = 256;
// On a multiprocessor: 1024 threads of 64 registers. With UNITS_IN_FLIGHT loads of 16 bytes each
// that is 64 KiB under way, where 5 TB/s and 0.7 us by 132 multiprocessors ask for 27 KiB: chosen by
// arithmetic, not measured.
constexpr int MIN_BLOCKS = 4;
constexpr int WARP_THREADS = 32;
constexpr int WARP_BITS = 5;
constexpr int UNITS_IN_FLIGHT = 4;  // of one group, where it has several

constexpr int TIER_DEVICE = 0, TIER_ABSENT = 3, TIER_FILLED = 4;  // as in cache/plan.py
constexpr int TIER_BITS = 3;
constexpr int POOLING_NONE = 0, POOLING_MEAN = 2;  // as in cache/device.py
constexpr int OUTPUT_WORDS = 6, FILL_WORDS = 3, MOVE_WORDS = 2;

// The parameters of a launch. Offsets (`..._at`) and sizes of the plan are in words of 64 bits.
struct Launch {
    const int64* words;  // the plan; the reads are at its start
    int64 num_outputs;
    int64 outputs_at;
    int64 num_units;  // of all outputs together
    int64 fills_at;   // {fill_slot, fill_from, spill_slot or -1}
    int64 num_free_fills;  // the first ones, which no read names
    int64 moves_at;  // {move_from, move_to}
    int64 num_moves;
    char* device_slots;
    char* host_slots;  // pinned and mapped
    int64 slot_bytes;  // a multiple of 16
    float* device_scales;  // one a slot; null where the format has none
    float* host_scales;
    const float* default_of;  // by table: an absent row is this value in every column
    unsigned* device_marks;   // one a slot, zero at the start; of the debug build
    unsigned* host_marks;
};

// An output as the plan describes it.
struct Output {
    int64 first_unit;      // of this output among all units
    int64 first_position;  // of the reads
    float* rows;           // [n, dim]
    int64 dim;
    int64 pooling;
    int64 offsets_at;  // without pooling -1
};

// Where the bytes of a row are.
struct Row {
    const char* bytes;  // null: absent
    float number;       // the value of an absent row, or the scale of an int8 row
};

// The threads that do one item together.
struct Group {
    int lane;   // of this thread
    int lanes;  // a power of two, at most a warp
};

// ---- Row formats: 16 bytes of a slot hold COUNT values

DEVICE unsigned word_of(uint4 chunk, int index) {
    return index == 0 ? chunk.x : index == 1 ? chunk.y : index == 2 ? chunk.z : chunk.w;
}

// Processors disagree about the bits of a NaN that comes out of arithmetic; here they are these.
DEVICE float settled(float value) {
    return value == value ? value : __uint_as_float(0x7fc00000u);
}

struct Float32 {
    static constexpr int COUNT = 4;
    static constexpr bool HAS_SCALES = false;
    static DEVICE float value(uint4 chunk, int index, float) {
        return __uint_as_float(word_of(chunk, index));
    }
};

struct Float16 {
    static constexpr int COUNT = 8;
    static constexpr bool HAS_SCALES = false;
    static DEVICE float value(uint4 chunk, int index, float) {
        const unsigned half = word_of(chunk, index / 2) >> (index % 2 * 16);
        const unsigned exponent = half >> 10 & 0x1f;
        const unsigned fraction = half & 0x3ff;
        unsigned bits = (exponent + 112) << 23 | fraction << 13;  // 112 = 127 - 15, the biases
        if (exponent == 31) bits = 0x7f800000u | fraction << 13;  // infinity, NaN with its payload
        if (exponent == 0) bits = __float_as_uint(static_cast<float>(fraction) * 0x1p-24f);
        return __uint_as_float(bits | (half & 0x8000u) << 16);
    }
};

struct BFloat16 {
    static constexpr int COUNT = 8;
    static constexpr bool HAS_SCALES = false;
    static DEVICE float value(uint4 chunk, int index, float) {
        const unsigned word = word_of(chunk, index / 2);
        return __uint_as_float(index % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
};

struct Int8 {
    static constexpr int COUNT = 16;
    static constexpr bool HAS_SCALES = true;
    static DEVICE float value(uint4 chunk, int index, float scale) {
        const unsigned byte = word_of(chunk, index / 4) >> (index % 4 * 8);
        return settled(static_cast<float>(static_cast<signed char>(byte)) * scale);
    }
};

template <class Format>
DEVICE float value_in(Row row, uint4 chunk, int index) {
    return row.bytes == nullptr ? row.number : Format::value(chunk, index, row.number);
}

template <class Format>
DEVICE float4 values_in(Row row, uint4 chunk, int first) {
    return {value_in<Format>(row, chunk, first), value_in<Format>(row, chunk, first + 1),
            value_in<Format>(row, chunk, first + 2), value_in<Format>(row, chunk, first + 3)};
}

// ---- Memory

// Mapped host memory is global memory too. The compiler cannot know that of an address that was
// chosen, or read from the plan.
template <class T>
DEVICE T* global(T* address) {
    __builtin_assume(__isGlobal(address));
    return address;
}

DEVICE uint4 load_chunk(const char* address) {
    return *global(reinterpret_cast<const uint4*>(address));
}

DEVICE void store_chunk(char* address, uint4 chunk) {
    *global(reinterpret_cast<uint4*>(address)) = chunk;
}

// The debug build marks what each item touches. Of two touches that must not meet, the later finds
// the mark of the earlier, in whatever order they come.
constexpr unsigned READ = 1, WRITTEN = 2;

DEVICE void mark(unsigned* marks, int64 slot, unsigned touch) {
#ifdef HOTSHELF_DEBUG
    const unsigned forbidden = touch == READ ? WRITTEN : READ | WRITTEN;
    if (atomicOr(marks + slot, touch) & forbidden) __trap();
#endif
}

// ---- Copies

// Copy a host slot to a device slot, and before that the bytes there to the spill slot if any. A
// thread spills the 16 bytes that it then fills, so that no other thread must wait for it.
template <class Format>
DEVICE void fill_slot(const Launch& launch, int64 fill, Group group) {
    const int64* const words = launch.words + launch.fills_at + FILL_WORDS * fill;
    const int64 slot = words[0], from = words[1], spill = words[2];
    if (group.lane == 0) {
        mark(launch.device_marks, slot, WRITTEN);
        mark(launch.host_marks, from, READ);
        if (spill >= 0) mark(launch.host_marks, spill, WRITTEN);
    }
    char* const target = launch.device_slots + slot * launch.slot_bytes;
    const char* const source = launch.host_slots + from * launch.slot_bytes;
    char* const spilled = launch.host_slots + spill * launch.slot_bytes;
    for (int at = group.lane * 16; at < launch.slot_bytes; at += group.lanes * 16) {
        const uint4 chunk = load_chunk(source + at);
        if (spill >= 0) store_chunk(spilled + at, load_chunk(target + at));
        store_chunk(target + at, chunk);
    }
    if (Format::HAS_SCALES && group.lane == 0) {
        if (spill >= 0) launch.host_scales[spill] = launch.device_scales[slot];
        launch.device_scales[slot] = launch.host_scales[from];
    }
}

// Copy a device slot to another one.
template <class Format>
DEVICE void move_slot(const Launch& launch, int64 move, Group group) {
    const int64* const words = launch.words + launch.moves_at + MOVE_WORDS * move;
    const int64 from = words[0], to = words[1];
    if (group.lane == 0) {
        mark(launch.device_marks, from, READ);
        mark(launch.device_marks, to, WRITTEN);
    }
    const char* const source = launch.device_slots + from * launch.slot_bytes;
    char* const target = launch.device_slots + to * launch.slot_bytes;
    for (int at = group.lane * 16; at < launch.slot_bytes; at += group.lanes * 16) {
        store_chunk(target + at, load_chunk(source + at));
    }
    if (Format::HAS_SCALES && group.lane == 0) {
        launch.device_scales[to] = launch.device_scales[from];
    }
}

// ---- Units

DEVICE Output read_output(const Launch& launch, int64 index) {
    const int64* words = launch.words + launch.outputs_at + OUTPUT_WORDS * index;
    return {words[0], words[1], reinterpret_cast<float*>(words[2]), words[3], words[4], words[5]};
}

// The last output that begins at or before `unit`; empty outputs begin where the next one does.
DEVICE int64 find_output(const Launch& launch, int64 unit) {
    int64 low = 0, high = launch.num_outputs;
    while (high - low > 1) {
        const int64 middle = (low + high) / 2;
        if (launch.words[launch.outputs_at + OUTPUT_WORDS * middle] <= unit) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

DEVICE int tier_of(int64 read) { return static_cast<int>(read) & ((1 << TIER_BITS) - 1); }

// Do the fills that are named by `count` reads, each `stride` words after the other.
template <class Format>
DEVICE void fill_for(
    const Launch& launch, const int64* reads, int64 count, int stride, Group group
) {
#pragma unroll 1
    for (int64 n = 0; n < count; ++n) {
        const int64 read = reads[n * stride];
        if (tier_of(read) == TIER_FILLED) fill_slot<Format>(launch, read >> TIER_BITS, group);
    }
}

// A filled row is where its fill has put it: each thread reads the 16 bytes that it has written.
template <class Format>
DEVICE Row find_row(const Launch& launch, int64 read, bool is_marking) {
    const int64 slot = read >> TIER_BITS;
    const int tier = tier_of(read);
    if (tier == TIER_ABSENT) return {nullptr, launch.default_of[slot]};
    if (tier == TIER_FILLED) {
        const int64* const words = launch.words + launch.fills_at + FILL_WORDS * slot;
        Row row{launch.device_slots + words[0] * launch.slot_bytes, 0.0f};
        if (Format::HAS_SCALES) row.number = launch.host_scales[words[1]];
        return row;
    }
    const bool is_device = tier == TIER_DEVICE;
    if (is_marking) mark(is_device ? launch.device_marks : launch.host_marks, slot, READ);
    const char* slots = is_device ? launch.device_slots : launch.host_slots;
    Row row{slots + slot * launch.slot_bytes, 0.0f};
    if (Format::HAS_SCALES) {
        row.number = (is_device ? launch.device_scales : launch.host_scales)[slot];
    }
    return row;
}

// Write four values from `column` on, as far as the row goes; in one store if `is_wide`.
DEVICE void store_values(float* row, int column, int dim, bool is_wide, float4 values) {
    if (column >= dim) return;
    float* const target = global(row + column);
    if (is_wide) {
        *reinterpret_cast<float4*>(target) = values;
        return;
    }
    target[0] = values.x;
    if (column + 1 < dim) target[1] = values.y;
    if (column + 2 < dim) target[2] = values.z;
    if (column + 3 < dim) target[3] = values.w;
}

// Whether all rows of the output can be stored 16 bytes at a time.
DEVICE bool is_wide(const Output& output) {
    return output.dim % 4 == 0 && reinterpret_cast<unsigned long long>(output.rows) % 16 == 0;
}

// Write N units of an output without pooling: `unit`, `unit + stride`, ... Each step is done for
// all before the next one, so that the loads of a thread wait for memory together.
template <class Format, int N>
DEVICE void write_rows(
    const Launch& launch, const Output& output, int64 unit, int stride, Group group
) {
    const int dim = static_cast<int>(output.dim);
    const bool wide = is_wide(output);
    const int64 index = unit - output.first_unit;
    float* const target = output.rows + index * output.dim;
    const int64* const positions = launch.words + output.first_position + index;
    int64 reads[N];
    Row rows[N];
#pragma unroll
    for (int n = 0; n < N; ++n) reads[n] = positions[n * stride];
    bool has_fill = false;
#pragma unroll
    for (int n = 0; n < N; ++n) has_fill |= tier_of(reads[n]) == TIER_FILLED;
    if (has_fill) fill_for<Format>(launch, positions, N, stride, group);
#pragma unroll
    for (int n = 0; n < N; ++n) rows[n] = find_row<Format>(launch, reads[n], group.lane == 0);
    const int step = group.lanes * Format::COUNT;
    for (int column = group.lane * Format::COUNT; column < dim; column += step) {
        uint4 chunks[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            chunks[n] = uint4{0, 0, 0, 0};
            if (rows[n].bytes != nullptr) {
                chunks[n] = load_chunk(rows[n].bytes + column * (16 / Format::COUNT));
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float* const row = target + n * stride * output.dim;
#pragma unroll
            for (int value = 0; value < Format::COUNT; value += 4) {
                const float4 four = values_in<Format>(rows[n], chunks[n], value);
                store_values(row, column + value, dim, wide, four);
            }
        }
    }
}

// Write the sum or the mean of a bag's rows, N of which are loaded at once.
template <class Format, int N>
DEVICE void pool_rows(const Launch& launch, const Output& output, int64 unit, Group group) {
    const int dim = static_cast<int>(output.dim);
    const int64 bag = unit - output.first_unit;
    const int64 begin = launch.words[output.offsets_at + bag];
    const int64 end = launch.words[output.offsets_at + bag + 1];
    const int64* const positions = launch.words + output.first_position;
    fill_for<Format>(launch, positions + begin, end - begin, 1, group);
    const int step = group.lanes * Format::COUNT;
    for (int column = group.lane * Format::COUNT; column < dim; column += step) {
        float sums[Format::COUNT];
#pragma unroll
        for (int value = 0; value < Format::COUNT; ++value) sums[value] = 0.0f;
        for (int64 first = begin; first < end; first += N) {
            int64 reads[N];
            Row rows[N];
            uint4 chunks[N];
#pragma unroll
            for (int n = 0; n < N; ++n) reads[n] = first + n < end ? positions[first + n] : 0;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                rows[n] = Row{nullptr, 0.0f};
                if (first + n < end) rows[n] = find_row<Format>(launch, reads[n], column == 0);
            }
#pragma unroll
            for (int n = 0; n < N; ++n) {
                chunks[n] = uint4{0, 0, 0, 0};
                if (rows[n].bytes != nullptr) {
                    chunks[n] = load_chunk(rows[n].bytes + column * (16 / Format::COUNT));
                }
            }
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (first + n < end) {
#pragma unroll
                    for (int value = 0; value < Format::COUNT; ++value) {
                        sums[value] += value_in<Format>(rows[n], chunks[n], value);
                    }
                }
            }
        }
        const bool is_mean = output.pooling == POOLING_MEAN && end > begin;
        const float divisor = is_mean ? static_cast<float>(end - begin) : 1.0f;
#pragma unroll
        for (int value = 0; value < Format::COUNT; ++value) {
            sums[value] = settled(sums[value] / divisor);
        }
        float* const row = output.rows + bag * output.dim;
#pragma unroll
        for (int value = 0; value < Format::COUNT; value += 4) {
            const float4 four{sums[value], sums[value + 1], sums[value + 2], sums[value + 3]};
            store_values(row, column + value, dim, is_wide(output), four);
        }
    }
}

template <class Format>
DEVICE void write_unit(const Launch& launch, int64 unit, Group group) {
    const Output output = read_output(launch, find_output(launch, unit));
    if (output.pooling == POOLING_NONE) {
        write_rows<Format, 1>(launch, output, unit, 0, group);
    } else {
        // Sums fill registers too: the more values a chunk has, the fewer chunks are in flight.
        pool_rows<Format, 16 / Format::COUNT>(launch, output, unit, group);
    }
}

// Write UNITS_IN_FLIGHT units together: `unit`, `unit + stride`, ... False where they are not all
// rows of one output, and then nothing is written.
template <class Format>
DEVICE bool write_units(const Launch& launch, int64 unit, int stride, Group group) {
    const int64 last = unit + (UNITS_IN_FLIGHT - 1) * stride;
    if (last >= launch.num_units) return false;
    const int64 index = find_output(launch, unit);
    const Output output = read_output(launch, index);
    if (output.pooling != POOLING_NONE) return false;
    if (index + 1 < launch.num_outputs &&
        launch.words[launch.outputs_at + OUTPUT_WORDS * (index + 1)] <= last) {
        return false;
    }
    write_rows<Format, UNITS_IN_FLIGHT>(launch, output, unit, stride, group);
    return true;
}

// ---- The launch

// Give each group its items. Where the grid has a group for every unit, each takes one; else each
// takes UNITS_IN_FLIGHT, side by side with the other groups of its warp.
template <class Format>
DEVICE void execute(const Launch& launch) {
    int lane_bits = 0;
    while (lane_bits < WARP_BITS && (16 << lane_bits) < launch.slot_bytes) ++lane_bits;
    const int groups_bits = WARP_BITS - lane_bits;
    const int groups_per_warp = 1 << groups_bits;
    const int warps_per_block = BLOCK_THREADS / WARP_THREADS;
    const Group group{static_cast<int>(threadIdx.x) & ((1 << lane_bits) - 1), 1 << lane_bits};
    const int group_of_warp = static_cast<int>(threadIdx.x % WARP_THREADS) >> lane_bits;
    const int64 warp =
        static_cast<int64>(blockIdx.x) * warps_per_block + threadIdx.x / WARP_THREADS;

    const int64 num_copies = launch.num_free_fills + launch.num_moves;
    const int64 copy_warps = (num_copies + groups_per_warp - 1) >> groups_bits;
    if (warp < copy_warps) {
        const int64 copy = (warp << groups_bits) + group_of_warp;
        if (copy < launch.num_free_fills) {
            fill_slot<Format>(launch, copy, group);
        } else if (copy < num_copies) {
            move_slot<Format>(launch, copy - launch.num_free_fills, group);
        }
        return;
    }
    const int64 unit_warp = warp - copy_warps;
    const int64 unit_warps = static_cast<int64>(gridDim.x) * warps_per_block - copy_warps;
    const bool is_one_each = (unit_warps << groups_bits) >= launch.num_units;
    const int units_per_group = is_one_each ? 1 : UNITS_IN_FLIGHT;
    const int64 unit = (unit_warp << groups_bits) * units_per_group + group_of_warp;
    if (!is_one_each && write_units<Format>(launch, unit, groups_per_warp, group)) return;
    for (int n = 0; n < units_per_group; ++n) {
        const int64 one = unit + n * groups_per_warp;
        if (one < launch.num_units) write_unit<Format>(launch, one, group);
    }
}

#define HOTSHELF_KERNEL(NAME, FORMAT)                                                             \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS) NAME(                 \
        const int64* words, int64 num_outputs, int64 outputs_at, int64 num_units, int64 fills_at, \
        int64 num_free_fills, int64 moves_at, int64 num_moves, char* device_slots,                \
        char* host_slots, int64 slot_bytes, float* device_scales, float* host_scales,             \
        const float* default_of, unsigned* device_marks, unsigned* host_marks                     \
    ) {                                                                                           \
        execute<FORMAT>(Launch{words, num_outputs, outputs_at, num_units, fills_at,               \
                               num_free_fills, moves_at, num_moves, device_slots, host_slots,     \
                               slot_bytes, device_scales, host_scales, default_of,                \
                               device_marks, host_marks});                                        \
    }

HOTSHELF_KERNEL(execute_float32, Float32)
HOTSHELF_KERNEL(execute_float16, Float16)
HOTSHELF_KERNEL(execute_bfloat16, BFloat16)
HOTSHELF_KERNEL(execute_int8, Int8)
