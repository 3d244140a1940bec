// Octic operations, forward and backward, each one pass over memory.
//
// A field is two arrays: A1, A2, B1, B2 in `ab` (4, rows, c), and the two components of E in `e` (2, rows, 2c), where a
// row is a token. E counts as four parts of c channels, the halves of its components: 4 and 5 are the first halves of
// components 0 and 1, 6 and 7 the second halves.

#include "simd.h"

namespace {

// The error function.
inline double erf_(double z) { return std::erf(z); }

// In single precision z P(z²) / Q(z²) on [-4, 4], the least largest error, 2e-9; rounding makes it 3e-7. Outside ±1.
inline float erf_(float z) {
    z = z < -4.0f ? -4.0f : z > 4.0f ? 4.0f : z;
    float s = z * z;
    float p = -1.36667929e-08f;
    p = std::fma(p, s, 4.78054153e-06f);
    p = std::fma(p, s, 3.82692276e-04f);
    p = std::fma(p, s, 3.83952821e-03f);
    p = std::fma(p, s, 5.43325948e-02f);
    p = std::fma(p, s, 1.84710327e-01f);
    p = std::fma(p, s, 1.12837918f);
    float q = 6.40092876e-05f;
    q = std::fma(q, s, 1.30957889e-03f);
    q = std::fma(q, s, 1.54535144e-02f);
    q = std::fma(q, s, 1.13826300e-01f);
    q = std::fma(q, s, 4.97028811e-01f);
    q = std::fma(q, s, 1.0f);
    return z * p / q;
}

template <class T> inline T gelu(T x) { return T(0.5) * x * (T(1) + erf_(x * T(0.70710678118654752440))); }

template <class T> inline T gelu_slope(T x) {
    T density = T(0.39894228040143267794) * fast_exp(T(-0.5) * x * x);
    return T(0.5) * (T(1) + erf_(x * T(0.70710678118654752440))) + x * density;
}

constexpr double QUARTER = 0.35355339059327376220;  // √2/4, which makes the transform to regular values orthonormal

// Eight numbers by name: of an array the compiler would make memory, and no vectors.
template <class T> struct Eight {
    T a, b, c, d, e, f, g, h;
};

// From the eight parts to the values at e, rr, r, rrr, m, mrr, mr, mrrr.
template <class T> inline Eight<T> to_regular(Eight<T> p) {
    T s1 = p.a + p.b, d1 = p.a - p.b, s2 = p.c + p.d, d2 = p.c - p.d;
    T u = p.e + p.f, v = p.e - p.f, w = p.g + p.h, z = p.g - p.h;
    T k = T(QUARTER), a = k * (s1 + s2), b = k * (s1 - s2), c = k * (d1 + d2), d = k * (d1 - d2);
    T a1 = k * (u + z), b1 = k * (v - w), c1 = k * (v + w), d1_ = k * (u - z);
    return {a + a1, a - a1, b + b1, b - b1, c - c1, c + c1, d - d1_, d + d1_};
}

// And back: the transpose.
template <class T> inline Eight<T> to_irreps(Eight<T> y) {
    T k = T(QUARTER);
    T a = k * (y.a + y.b), b = k * (y.c + y.d), c = k * (y.e + y.f), d = k * (y.g + y.h);
    T f = k * (y.a - y.b), g = k * (y.c - y.d), h = k * (y.e - y.f), i = k * (y.g - y.h);
    return {(a + b) + (c + d), (a + b) - (c + d), (a - b) + (c - d), (a - b) - (c - d),
            (f + g) - (h + i), (f - g) + (h - i), (f - g) - (h - i), -(f + g) - (h + i)};
}

// The eight parts of a row, or places for them. The pointers by name: the compiler sees that it may use vectors.
template <class T> struct Row {
    T *__restrict a, *__restrict b, *__restrict c, *__restrict d, *__restrict e, *__restrict f, *__restrict g,
        *__restrict h;

    Row(T *ab, T *ee, int64_t row, int64_t rows, int64_t n) {
        a = ab + row * n, b = a + rows * n, c = b + rows * n, d = c + rows * n;
        e = ee + row * 2 * n, f = e + rows * 2 * n, g = e + n, h = f + n;
    }
};

template <class T> inline Eight<T> read(const Row<const T> &x, int64_t j) {
    return {x.a[j], x.b[j], x.c[j], x.d[j], x.e[j], x.f[j], x.g[j], x.h[j]};
}

template <class T> inline void write(const Row<T> &x, int64_t j, Eight<T> p) {
    x.a[j] = p.a, x.b[j] = p.b, x.c[j] = p.c, x.d[j] = p.d, x.e[j] = p.e, x.f[j] = p.f, x.g[j] = p.g, x.h[j] = p.h;
}

template <class T>
void gelu_forward(const T *ab, const T *e, T *out_ab, T *out_e, int64_t rows, int64_t n, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const FlushSubnormals flush;
        Row<const T> x(ab, e, row, rows, n);
        Row<T> out(out_ab, out_e, row, rows, n);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            Eight<T> y = to_regular(read(x, j));
            write(out, j, to_irreps<T>({gelu(y.a), gelu(y.b), gelu(y.c), gelu(y.d), gelu(y.e), gelu(y.f), gelu(y.g),
                                        gelu(y.h)}));
        }
    }
}

template <class T>
void gelu_backward(const T *grad_ab, const T *grad_e, const T *ab, const T *e, T *out_ab, T *out_e, int64_t rows,
                   int64_t n, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const FlushSubnormals flush;
        Row<const T> x(ab, e, row, rows, n), grad(grad_ab, grad_e, row, rows, n);
        Row<T> out(out_ab, out_e, row, rows, n);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            Eight<T> y = to_regular(read(x, j)), g = to_regular(read(grad, j));
            write(out, j, to_irreps<T>({g.a * gelu_slope(y.a), g.b * gelu_slope(y.b), g.c * gelu_slope(y.c),
                                        g.d * gelu_slope(y.d), g.e * gelu_slope(y.e), g.f * gelu_slope(y.f),
                                        g.g * gelu_slope(y.g), g.h * gelu_slope(y.h)}));
        }
    }
}

template <class T> inline T sum(const T *x, int64_t n) {
    T total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < n; j++) total += x[j];
    return total;
}

// Sums of squares around a center.
template <class T> inline T spread(const T *x, T center, int64_t n) {
    T total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t j = 0; j < n; j++) total += (x[j] - center) * (x[j] - center);
    return total;
}

// The six components of a row, their lengths, means, weights, and the scale: √2/4 · √(Σ variances + eps).
template <class T> struct Norm {
    const T *x[6];
    int64_t size[6], offset[6];  // of weights, which the components of E share
    T mean[6], scale;

    Norm(const T *ab, const T *e, int64_t row, int64_t rows, int64_t c, T eps) {
        T total = eps;
        for (int64_t i = 0; i < 6; i++) {
            size[i] = i < 4 ? c : 2 * c;
            offset[i] = i < 4 ? i * c : 4 * c;
            x[i] = i < 4 ? ab + (i * rows + row) * c : e + ((i - 4) * rows + row) * 2 * c;
            mean[i] = sum(x[i], size[i]) / size[i];
            T variance = spread(x[i], mean[i], size[i]) / size[i];
            total += i < 4 ? variance : variance / 2;
        }
        scale = T(QUARTER) * std::sqrt(total);
    }

    template <class U> static U *place(U *ab, U *e, int64_t i, int64_t row, int64_t rows, int64_t c) {
        return i < 4 ? ab + (i * rows + row) * c : e + ((i - 4) * rows + row) * 2 * c;
    }
};

template <class T>
void norm_forward(const T *ab, const T *e, const T *weight, const T *bias, T *out_ab, T *out_e, int64_t rows,
                  int64_t c, T eps, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const FlushSubnormals flush;
        Norm<T> norm(ab, e, row, rows, c, eps);
        T inverse = T(1) / norm.scale;
        for (int64_t i = 0; i < 6; i++) {
            const T *x = norm.x[i], *w = weight + norm.offset[i];
            T *out = Norm<T>::place(out_ab, out_e, i, row, rows, c), mean = norm.mean[i];
            if (i == 0) {
#pragma omp simd
                for (int64_t j = 0; j < c; j++) out[j] = (x[j] - mean) * inverse * w[j] + bias[j];
            } else {
#pragma omp simd
                for (int64_t j = 0; j < norm.size[i]; j++) out[j] = (x[j] - mean) * inverse * w[j];
            }
        }
    }
}

// With y = u / s and u = x − mean: ds/du is s'·u, and the mean of a component takes the mean of its gradient away.
template <class T>
void norm_backward(const T *grad_ab, const T *grad_e, const T *ab, const T *e, const T *weight, T *out_ab, T *out_e,
                   T *grad_weights, T *grad_biases, int64_t rows, int64_t c, T eps, int64_t threads) {
    int64_t block = (rows + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t part = 0; part < threads; part++) {
        const FlushSubnormals flush;
        T *grad_weight = grad_weights + part * 6 * c, *grad_bias = grad_biases + part * c;
        for (int64_t row = part * block; row < std::min(rows, (part + 1) * block); row++) {
            Norm<T> norm(ab, e, row, rows, c, eps);
            T inverse = T(1) / norm.scale, mean_grad[6], along = 0;
            for (int64_t i = 0; i < 6; i++) {
                const T *x = norm.x[i], *w = weight + norm.offset[i];
                const T *g = Norm<T>::place(grad_ab, grad_e, i, row, rows, c);
                T *dw = grad_weight + norm.offset[i], mean = norm.mean[i], total = 0, inner = 0;
#pragma omp simd reduction(+ : total, inner)
                for (int64_t j = 0; j < norm.size[i]; j++) {
                    T u = x[j] - mean;
                    total += g[j] * w[j];
                    inner += g[j] * w[j] * u;
                    dw[j] += g[j] * u * inverse;
                }
                mean_grad[i] = total / norm.size[i];
                along += inner;
            }
            const T *first = Norm<T>::place(grad_ab, grad_e, 0, row, rows, c);
            for (int64_t j = 0; j < c; j++) grad_bias[j] += first[j];
            // s² = (k²)(Σ variances + eps), so ds/du = k² u / (s·c), of E half of it over 2c channels.
            T slope = along * inverse * inverse * inverse * T(QUARTER * QUARTER) / c;
            for (int64_t i = 0; i < 6; i++) {
                const T *x = norm.x[i], *w = weight + norm.offset[i];
                const T *g = Norm<T>::place(grad_ab, grad_e, i, row, rows, c);
                T *out = Norm<T>::place(out_ab, out_e, i, row, rows, c), mean = norm.mean[i], shift = mean_grad[i];
                T pull = i < 4 ? slope : slope / 4;
#pragma omp simd
                for (int64_t j = 0; j < norm.size[i]; j++)
                    out[j] = (g[j] * w[j] - shift) * inverse - (x[j] - mean) * pull;
            }
        }
    }
}

}  // namespace

extern "C" void octic_gelu(const Scalar *ab, const Scalar *e, Scalar *out_ab, Scalar *out_e, int64_t rows, int64_t c,
        int64_t threads) {
    gelu_forward<Scalar>(ab, e, out_ab, out_e, rows, c, threads);
}
extern "C" void octic_gelu_backward(const Scalar *grad_ab, const Scalar *grad_e, const Scalar *ab, const Scalar *e,
        Scalar *out_ab, Scalar *out_e, int64_t rows, int64_t c, int64_t threads) {
    gelu_backward<Scalar>(grad_ab, grad_e, ab, e, out_ab, out_e, rows, c, threads);
}
extern "C" void octic_norm(const Scalar *ab, const Scalar *e, const Scalar *weight, const Scalar *bias, Scalar *out_ab,
        Scalar *out_e, int64_t rows, int64_t c, double eps, int64_t threads) {
    norm_forward<Scalar>(ab, e, weight, bias, out_ab, out_e, rows, c, Scalar(eps), threads);
}
extern "C" void octic_norm_backward(const Scalar *grad_ab, const Scalar *grad_e, const Scalar *ab, const Scalar *e,
        const Scalar *weight, Scalar *out_ab, Scalar *out_e, Scalar *grad_weights, Scalar *grad_biases, int64_t rows,
        int64_t c, double eps, int64_t threads) {
    norm_backward<Scalar>(grad_ab, grad_e, ab, e, weight, out_ab, out_e, grad_weights, grad_biases, rows, c, Scalar(eps),
                     threads);
}
