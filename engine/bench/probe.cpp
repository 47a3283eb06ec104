// What this processor really does: bytes it reads a second, and products it adds up a second in each number format. Each probe
// starts all threads together, and times from that start to the end of the last one. Entry points: turnkeep_probe_read,
// turnkeep_probe_rate.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Runs work(thread) on `threads` threads that start together. Returns the seconds from the start to the last one's end.
template <class Work>
double together(int threads, const Work& work) {
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    std::vector<Clock::time_point> ends(threads);
    std::vector<std::thread> helpers;
    const auto part = [&](int i) {
        ready.fetch_add(1);
        while (!go.load(std::memory_order_acquire)) relax();
        work(i);
        ends[i] = Clock::now();
    };
    for (int i = 1; i < threads; i++) helpers.emplace_back(part, i);
    while (ready.load() != threads - 1) std::this_thread::yield();
    const auto began = Clock::now();
    go.store(true, std::memory_order_release);
    part(0);
    for (auto& helper : helpers) helper.join();
    auto last = began;
    for (const auto& end : ends) last = end > last ? end : last;
    return std::chrono::duration<double>(last - began).count();
}

// A result that is stored where the compiler must not leave it out.
template <class T>
void keep(const T& value) {
    asm volatile("" : : "g"(&value) : "memory");
}

typedef uint64_t Words __attribute__((vector_size(64)));

// Eight streams side by side: more lines are in flight than the hardware's prefetching of one stream brings.
void read_all(const char* from, int64_t bytes) {
    constexpr int kStreams = 8;
    const int64_t stream = bytes / kStreams / 64 * 64;
    Words sums[kStreams] = {};
    for (int64_t at = 0; at < stream; at += 64)
#pragma GCC unroll 8
        for (int s = 0; s < kStreams; s++) {
            Words line;
            memcpy(&line, from + s * stream + at, 64);
            sums[s] += line;
        }
    keep(sums);
}

// The independent sums of one format, as many as the registers hold beside two operands. Rounds are unrolled because a taken branch
// can cost as much as sixteen products.
#if defined(__AVX512F__)
constexpr int kSums = 18;
#else
constexpr int kSums = 12;
#endif
constexpr int kUnroll = 4;

struct Float32 {
#if defined(__AVX512F__)
    static constexpr double kOperations = 16 * 2;
    using Vector = __m512;
    static Vector one() { return _mm512_set1_ps(1e-6f); }
    static Vector add(Vector sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
#elif defined(__AVX2__) && defined(__FMA__)
    static constexpr double kOperations = 8 * 2;
    using Vector = __m256;
    static Vector one() { return _mm256_set1_ps(1e-6f); }
    static Vector add(Vector sum, Vector a, Vector b) { return _mm256_fmadd_ps(a, b, sum); }
#else
    static constexpr double kOperations = 4 * 2;
    typedef float Vector __attribute__((vector_size(16)));
    static Vector one() { return Vector{1e-6f, 1e-6f, 1e-6f, 1e-6f}; }
    static Vector add(Vector sum, Vector a, Vector b) { return sum + a * b; }
#endif
};

#if defined(__AVX512BF16__) && defined(__AVX512F__)
struct BFloat16 {
    static constexpr double kOperations = 32 * 2;
    using Vector = __m512;
    static Vector one() { return _mm512_castsi512_ps(_mm512_set1_epi32(0x38003800)); }
    static Vector add(Vector sum, Vector a, Vector b) {
        __m512bh x, y;
        memcpy(&x, &a, 64);
        memcpy(&y, &b, 64);
        return _mm512_dpbf16_ps(sum, x, y);
    }
};
#endif

#if defined(__AVX512FP16__)
struct Float16 {
    static constexpr double kOperations = 32 * 2;
    using Vector = __m512h;
    static Vector one() { return _mm512_castsi512_ph(_mm512_set1_epi16(0x0c00)); }
    static Vector add(Vector sum, Vector a, Vector b) { return _mm512_fmadd_ph(a, b, sum); }
};
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
struct Int8 {
    static constexpr double kOperations = 64 * 2;
    using Vector = __m512i;
    static Vector one() { return _mm512_set1_epi8(1); }
    static Vector add(Vector sum, Vector a, Vector b) { return _mm512_dpbusd_epi32(sum, a, b); }
};
#elif defined(__AVXVNNI__)
struct Int8 {
    static constexpr double kOperations = 32 * 2;
    using Vector = __m256i;
    static Vector one() { return _mm256_set1_epi8(1); }
    static Vector add(Vector sum, Vector a, Vector b) { return _mm256_dpbusd_avx_epi32(sum, a, b); }
};
#elif defined(__AVX2__)
struct Int8 {
    static constexpr double kOperations = 32 * 2;
    using Vector = __m256i;
    static Vector one() { return _mm256_set1_epi8(1); }
    static Vector add(Vector sum, Vector a, Vector b) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
    }
};
#endif

// The format's operands are hidden from the compiler, so that it can neither fold them nor move the products out of the loop.
#if defined(__AVX512F__)
#define HIDE(vector) asm volatile("" : "+v"(vector))
#elif defined(__x86_64__)
#define HIDE(vector) asm volatile("" : "+x"(vector))
#elif defined(__aarch64__)
#define HIDE(vector) asm volatile("" : "+w"(vector))
#else
#define HIDE(vector) asm volatile("" : "+m"(vector))
#endif
template <class Format>
double rate(int threads, int64_t rounds) {
    const double seconds = together(threads, [&](int) {
        typename Format::Vector a = Format::one(), b = Format::one(), sums[kSums];
        for (auto& sum : sums) sum = Format::one();
        for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 4
            for (int u = 0; u < kUnroll; u++) {
                HIDE(a);
                HIDE(b);
#pragma GCC unroll 18
                for (int s = 0; s < kSums; s++) sums[s] = Format::add(sums[s], a, b);
            }
        keep(sums);
    });
    return Format::kOperations * kSums * kUnroll * double(rounds) * threads / seconds;
}

#if defined(__AMX_TILE__) && defined(__linux__)
bool tiles_allowed() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// Four sums of 16 x 16, of two left and two right tiles, as a matrix product's inner loop has them.
template <bool kInt8>
double tile_rate(int threads, int64_t rounds) {
    const double seconds = together(threads, [&](int) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t columns[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int t = 0; t < 8; t++) shape.columns[t] = 64, shape.rows[t] = 16;
        _tile_loadconfig(&shape);
        alignas(64) static const char zeros[1024] = {};
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(4, zeros, 64);
        _tile_loadd(5, zeros, 64);
        _tile_loadd(6, zeros, 64);
        _tile_loadd(7, zeros, 64);
        for (int64_t i = 0; i < rounds; i++) {
            if constexpr (kInt8) {
#if defined(__AMX_INT8__)
                _tile_dpbusd(0, 4, 6);
                _tile_dpbusd(1, 4, 7);
                _tile_dpbusd(2, 5, 6);
                _tile_dpbusd(3, 5, 7);
#endif
            } else {
#if defined(__AMX_BF16__)
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
#endif
            }
        }
        alignas(64) char sink[1024];
        _tile_stored(0, sink, 64);
        keep(sink);
        _tile_release();
    });
    return 2.0 * 16 * 16 * (kInt8 ? 64 : 32) * 4 * double(rounds) * threads / seconds;
}
#endif

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Seconds in which `threads` threads read `bytes` bytes at `from` `times` times over, each a run of its own. `bytes` is a
// multiple of 512 * threads.
double turnkeep_probe_read(const char* from, int64_t bytes, int threads, int64_t times) {
    const int64_t part = bytes / threads;
    return together(threads, [&](int i) {
        for (int64_t n = 0; n < times; n++) read_all(from + i * part, part);
    });
}

// Operations a second (a product and its addition are two) over `rounds` rounds, or 0 where this build has no instruction for it.
// format: 0 float32, 1 bfloat16, 2 float16, 3 int8, 4 bfloat16 in tiles, 5 int8 in tiles.
double turnkeep_probe_rate(int format, int threads, int64_t rounds) {
    switch (format) {
        case 0: return rate<Float32>(threads, rounds);
#if defined(__AVX512BF16__) && defined(__AVX512F__)
        case 1: return rate<BFloat16>(threads, rounds);
#endif
#if defined(__AVX512FP16__)
        case 2: return rate<Float16>(threads, rounds);
#endif
#if defined(__AVX2__)
        case 3: return rate<Int8>(threads, rounds);
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
        case 4: return tiles_allowed() ? tile_rate<false>(threads, rounds) : 0;
#endif
#if defined(__AMX_INT8__) && defined(__linux__)
        case 5: return tiles_allowed() ? tile_rate<true>(threads, rounds) : 0;
#endif
    }
    return 0;
}
}
#pragma GCC visibility pop
