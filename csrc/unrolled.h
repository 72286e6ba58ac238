// Loops that the compiler unrolls.
#pragma once

#include <utility>

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

template <class Body, int... I>
inline __attribute__((always_inline)) void for_each_of(std::integer_sequence<int, I...>, const Body& body) {
    (body(std::integral_constant<int, I>()), ...);
}
// Calls body(I) for I from 0 to N - 1, each a compile-time constant.
template <int N, class Body>
inline __attribute__((always_inline)) void unrolled(const Body& body) {
    for_each_of(std::make_integer_sequence<int, N>(), body);
}

}  // namespace
}  // namespace PENSTOCK_ISA
}  // namespace penstock
