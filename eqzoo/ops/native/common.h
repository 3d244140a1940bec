// What the kernels share: an exponential that compilers can vectorise, and one name for each type.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// exp(x) for x <= 88 (float) or 709 (double) to about 1 ulp: 2^n times a polynomial on [-ln2/2, ln2/2]. Below the
// smallest normal number it gives 0, and so exp(-inf) = 0. No branches and no library call, so that loops vectorise.
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
