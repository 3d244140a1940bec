// Numbers of two vectors in another order; GCC has __builtin_shufflevector since version 12.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

// The numbers I... of a and b, counted through both.
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
