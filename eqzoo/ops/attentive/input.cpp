// Attention on the input of a convolution, one pass over the field each way: channel statistics and suppression.
#include "simd.h"

// stats (B, 2 S, P): mean and maximum over c of alpha(b, c, s) x(b, c, s, p); which: the channel of the maximum.
template <typename T>
static void statistics(const T *x, const T *alpha, T *stats, int32_t *which, int64_t batch, int64_t channels,
                       int64_t poses, int64_t pixels, int64_t threads) {
    parallel_for(batch * poses, threads, [=](int64_t task) {
        const int64_t b = task / poses, s = task % poses;
        T *__restrict mean = stats + (2 * b * poses + s) * pixels, *__restrict peak = mean + poses * pixels;
        int32_t *__restrict where = which + task * pixels;
        for (int64_t p = 0; p < pixels; p++) {
            mean[p] = 0;
            peak[p] = -std::numeric_limits<T>::infinity();
            where[p] = 0;
        }
        for (int64_t c = 0; c < channels; c++) {
            const int64_t plane = (b * channels + c) * poses + s;
            const T *__restrict from = x + plane * pixels;
            const T weight = alpha[plane];
            const int32_t own = static_cast<int32_t>(c);
#pragma omp simd
            for (int64_t p = 0; p < pixels; p++) {
                const T v = weight * from[p];
                mean[p] += v;
                where[p] = v > peak[p] ? own : where[p];
                peak[p] = v > peak[p] ? v : peak[p];
            }
        }
        for (int64_t p = 0; p < pixels; p++) mean[p] /= channels;
    });
}

template <typename T>
static void statistics_backward(const T *x, const T *alpha, const int32_t *which, const T *g, T *grad_x, T *grad_alpha,
                                int64_t batch, int64_t channels, int64_t poses, int64_t pixels, int64_t threads) {
    parallel_for(batch * poses, threads, [=](int64_t task) {
        const int64_t b = task / poses, s = task % poses;
        const T *__restrict mean = g + (2 * b * poses + s) * pixels, *__restrict peak = mean + poses * pixels;
        const int32_t *__restrict where = which + task * pixels;
        const T of_mean = T(1) / channels;
        for (int64_t c = 0; c < channels; c++) {
            const int64_t plane = (b * channels + c) * poses + s;
            const T *__restrict from = x + plane * pixels;
            T *__restrict to = grad_x + plane * pixels;
            const T weight = alpha[plane];
            const int32_t own = static_cast<int32_t>(c);
            T grad_sum = 0;
#pragma omp simd reduction(+ : grad_sum)
            for (int64_t p = 0; p < pixels; p++) {
                const T part = mean[p] * of_mean + (where[p] == own ? peak[p] : T(0));
                to[p] = weight * part;
                grad_sum += from[p] * part;
            }
            grad_alpha[plane] = grad_sum;
        }
    });
}

// y = x (1 - alpha(b, c, s) w(b, s, p)); without alpha its weight is 1.
template <typename T>
static void suppressed(const T *x, const T *alpha, const T *w, T *y, int64_t batch, int64_t channels, int64_t poses,
                     int64_t pixels, int64_t threads) {
    parallel_for(batch * channels, threads, [=](int64_t task) {
        for (int64_t s = 0; s < poses; s++) {
            const int64_t plane = task * poses + s;
            const T *__restrict from = x + plane * pixels;
            const T *__restrict place = w + (task / channels * poses + s) * pixels;
            T *__restrict to = y + plane * pixels;
            const T weight = alpha ? alpha[plane] : T(1);
#pragma omp simd
            for (int64_t p = 0; p < pixels; p++) to[p] = from[p] - from[p] * weight * place[p];
        }
    });
}

template <typename T>
static void suppressed_backward(const T *x, const T *alpha, const T *w, const T *g, T *grad_x, T *grad_alpha, T *grad_w,
                              int64_t batch, int64_t channels, int64_t poses, int64_t pixels, int64_t threads) {
    parallel_for(batch * poses, threads, [=](int64_t task) {
        const int64_t b = task / poses, s = task % poses;
        const T *__restrict place = w + task * pixels;
        T *__restrict grad_place = grad_w + task * pixels;
        for (int64_t p = 0; p < pixels; p++) grad_place[p] = 0;
        for (int64_t c = 0; c < channels; c++) {
            const int64_t plane = (b * channels + c) * poses + s;
            const T *__restrict from = x + plane * pixels, *__restrict grad = g + plane * pixels;
            T *__restrict to = grad_x + plane * pixels;
            const T weight = alpha ? alpha[plane] : T(1);
            T total = 0;
#pragma omp simd reduction(+ : total)
            for (int64_t p = 0; p < pixels; p++) {
                const T both = grad[p] * from[p];
                to[p] = grad[p] - grad[p] * weight * place[p];
                grad_place[p] -= both * weight;
                total -= both * place[p];
            }
            if (alpha) grad_alpha[plane] = total;
        }
    });
}

#define SIZES int64_t batch, int64_t channels, int64_t poses, int64_t pixels, int64_t threads
extern "C" void field_statistics(const Scalar *x, const Scalar *alpha, Scalar *stats, int32_t *which, SIZES) {
    statistics(x, alpha, stats, which, batch, channels, poses, pixels, threads);
}
extern "C" void field_statistics_backward(const Scalar *x, const Scalar *alpha, const int32_t *which, const Scalar *g,
        Scalar *grad_x, Scalar *grad_alpha, SIZES) {
    statistics_backward(x, alpha, which, g, grad_x, grad_alpha, batch, channels, poses, pixels, threads);
}
extern "C" void suppress(const Scalar *x, const Scalar *alpha, const Scalar *w, Scalar *y, SIZES) {
    suppressed(x, alpha, w, y, batch, channels, poses, pixels, threads);
}
extern "C" void suppress_backward(const Scalar *x, const Scalar *alpha, const Scalar *w, const Scalar *g,
        Scalar *grad_x, Scalar *grad_alpha, Scalar *grad_w, SIZES) {
    suppressed_backward(x, alpha, w, g, grad_x, grad_alpha, grad_w, batch, channels, poses, pixels, threads);
}
