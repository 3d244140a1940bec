// Shared by the kernels: vectors, the division of work among threads, and an exponential that vectorizes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

// The widest vectors of the processor that this is compiled for, in bytes.
#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif

// The upper half of a float, rounded to even; not-a-number stays so.
struct bfloat16 {
    uint16_t bits;
};

inline float widened(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline bfloat16 narrowed(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return {uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};
}

// What a type in memory is computed in.
template <typename T> struct ComputedIn { using type = T; };
template <> struct ComputedIn<bfloat16> { using type = float; };
template <typename T> using Computed = typename ComputedIn<T>::type;

#if defined(EQZOO_BFLOAT16)
using Scalar = bfloat16;  // the type that this is compiled for
#elif defined(EQZOO_DOUBLE)
using Scalar = double;
#else
using Scalar = float;
#endif
using Real = Computed<Scalar>;

// A vector of N numbers, by default as many as the processor's have; a single number for N = 1.
template <typename T> constexpr int lanes = vector_bytes / int(sizeof(Computed<T>));
template <typename T, int N> struct VectorOf { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <typename T> struct VectorOf<T, 1> { using type = T; };
template <typename T, int N = lanes<T>> using Vector = typename VectorOf<T, N>::type;

// Reads a vector or a single number, V, from any address.
template <typename V, typename T> inline V load_as(const T *from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <int N, typename T> inline Vector<Computed<T>, N> load(const T *from) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        Vector<uint32_t, N> bits;
        if constexpr (N == 1) {
            bits = from->bits;
        } else {
            bits = __builtin_convertvector((load_as<Vector<uint16_t, N>>(from)), Vector<uint32_t, N>);
        }
        bits <<= 16;
        return load_as<Vector<float, N>>(&bits);
    } else {
        return load_as<Vector<T, N>>(from);
    }
}

template <typename T> inline Vector<T> load(const T *from) { return load_as<Vector<T>>(from); }

// Rounds to the nearest bfloat16, ties to even; not-a-number stays so.
template <int N, typename T> inline void store(T *to, Vector<Computed<T>, N> value) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        const auto bits = load_as<Vector<uint32_t, N>>(&value);
        const auto rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const auto upper = value != value ? bits * 0 + 0x7fc0u : rounded;
        Vector<uint16_t, N> half;
        if constexpr (N == 1) {
            half = uint16_t(upper);
        } else {
            half = __builtin_convertvector(upper, Vector<uint16_t, N>);
        }
        std::memcpy(to, &half, sizeof half);
    } else {
        std::memcpy(to, &value, sizeof value);
    }
}

template <typename T> inline void store(T *to, Vector<T> v) { std::memcpy(to, &v, sizeof v); }

inline float upcast(float x) { return x; }
inline double upcast(double x) { return x; }
inline float upcast(bfloat16 x) { return widened(x); }
inline void downcast(float x, float *to) { *to = x; }
inline void downcast(double x, double *to) { *to = x; }
inline void downcast(float x, bfloat16 *to) { *to = narrowed(x); }

// The sum of the numbers of a vector, by halves.
template <typename T, int N = lanes<T>> inline T lane_sum(const void *vector) {
    if constexpr (N == 1) {
        return load_as<T>(static_cast<const char *>(vector));
    } else {
        const T *from = static_cast<const T *>(vector);
        const Vector<T, N / 2> sum = load_as<Vector<T, N / 2>>(from) + load_as<Vector<T, N / 2>>(from + N / 2);
        return lane_sum<T, N / 2>(&sum);
    }
}

// The numbers I... of a and b, counted through both; GCC has __builtin_shufflevector since version 12.
template <std::size_t... I, typename V> inline V shuffled(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, int(I)...);
#else
    typedef std::decay_t<decltype(a[0])> T;
    typedef std::conditional_t<sizeof(T) == 2, int16_t, std::conditional_t<sizeof(T) == 4, int32_t, int64_t>> Index;
    typedef Index Mask __attribute__((vector_size(sizeof(V))));
    return __builtin_shuffle(a, b, Mask{Index(I)...});
#endif
}

inline int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// While one lives, its thread takes numbers below the smallest normal one (1e-38 in float32, 1e-308 in float64) for 0.
// The products of small attention weights and gradients are such numbers, and processors take over a hundred cycles for
// each. On other processors than x86 and 64-bit Arm it does nothing.
class FlushSubnormals {
#if defined(__SSE2__)
    static constexpr unsigned flags = 0x8040;  // results (flush to zero) and operands (denormals are zero)
    const unsigned before = _mm_getcsr();

  public:
    FlushSubnormals() { _mm_setcsr(before | flags); }
    ~FlushSubnormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    static constexpr uint64_t flags = uint64_t(1) << 24;
    uint64_t before;

  public:
    FlushSubnormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        __asm__ volatile("msr fpcr, %0" : : "r"(before | flags));
    }
    ~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#else
  public:
    FlushSubnormals() {}
#endif
    FlushSubnormals(const FlushSubnormals &) = delete;
    FlushSubnormals &operator=(const FlushSubnormals &) = delete;
};

// The number of this thread.
inline int64_t thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// Divides n tasks among threads, the same tasks for the same slot in every run, so that sums are reproducible.
template <typename F> inline void share(int64_t n, int64_t threads, F work) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t slot = 0; slot < threads; slot++) {
        const FlushSubnormals flush;
        work(slot, n * slot / threads, n * (slot + 1) / threads);
    }
}

template <typename F> inline void parallel_for(int64_t n, int64_t threads, F work) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        const FlushSubnormals flush;
        work(i);
    }
}

// exp(x) for x <= 88 (float) or 709 (double) to about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2]. Below the
// smallest normal number it gives 0, and so exp(-inf) = 0. No branches and no library call, so that loops vectorize.
static inline float fast_exp(float x) {
    const float low = -87.3f;
    float y = x < low ? low : x;
    float n = std::nearbyint(y * 1.44269504088896341f);
    float r = std::fma(n, -0.693145751953125f, y);
    r = std::fma(n, -1.42860682030941723e-6f, r);
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p, r * r, r) + 1.0f;
    int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return x < low ? 0.0f : p * power;
}

static inline double fast_exp(double x) {
    const double low = -708.0;
    double y = x < low ? low : x;
    double n = std::nearbyint(y * 1.4426950408889634074);
    double r = std::fma(n, -6.93145751953125e-1, y);
    r = std::fma(n, -1.42860682030941723212e-6, r);
    // The Taylor series to r^13: below 2^-53 for |r| <= ln2/2.
    double p = 1.6059043836821614599e-10;
    p = std::fma(p, r, 2.0876756987868098979e-9);
    p = std::fma(p, r, 2.5052108385441718775e-8);
    p = std::fma(p, r, 2.7557319223985890653e-7);
    p = std::fma(p, r, 2.7557319223985892511e-6);
    p = std::fma(p, r, 2.4801587301587301566e-5);
    p = std::fma(p, r, 1.9841269841269841253e-4);
    p = std::fma(p, r, 1.3888888888888889419e-3);
    p = std::fma(p, r, 8.3333333333333332177e-3);
    p = std::fma(p, r, 4.1666666666666664354e-2);
    p = std::fma(p, r, 1.6666666666666665741e-1);
    p = std::fma(p, r, 0.5);
    p = std::fma(p, r * r, r) + 1.0;
    int64_t bits = (static_cast<int64_t>(n) + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, sizeof power);
    return x < low ? 0.0 : p * power;
}
