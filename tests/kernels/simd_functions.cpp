// Prints a digest of the results of each function of simd.h, over random and special numbers. NaNs count as equal, and
// what a function leaves undefined is not passed to it.
#define PENSTOCK_ISA tested
#include "simd.h"

#include <cstdio>
#include <cstdlib>

using namespace penstock::tested;

namespace {

uint64_t state = 88172645463325252u;
uint32_t random_bits() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return static_cast<uint32_t>(state >> 20);
}

float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

struct Digest {
    uint64_t hash = 14695981039346656037u;

    void add(uint32_t word) { hash = (hash ^ word) * 1099511628211u; }
    void add(const void* data, int words) {
        uint32_t word;
        for (int i = 0; i < words; i++) std::memcpy(&word, static_cast<const char*>(data) + 4 * i, 4), add(word);
    }
    void add(i32x16 x) {
        int32_t lanes[kLanes];
        store_i32(lanes, x);
        add(lanes, kLanes);
    }
    void add(f32x16 x) {
        float lanes[kLanes];
        store_f32(lanes, x);
        for (float lane : lanes) add_float(lane);
    }
    void add_float(float x) { x == x ? add(&x, 1) : add(0x7fc00000u); }
};

// Lanes of one kind of numbers: any bits; special ones; neighbours in magnitude, whose products and sums cancel or tie.
f32x16 floats(int kind) {
    static const uint32_t special[] = {0,          0x80000000, 0x3f800000, 0xbf800000, 0x7f800000, 0xff800000, 0x7fc00000,
                                       1,          0x007fffff, 0x00800000, 0x7f7fffff, 0xff7fffff, 0x477fefff, 0x477ff000,
                                       0x33000000, 0x33000001, 0x387fc000, 0x387fe000, 0x38800000, 0x3f000000, 0x42fc0000};
    float lanes[kLanes];
    for (float& lane : lanes) {
        uint32_t bits = random_bits();
        if (kind == 1) bits = special[bits % (sizeof special / 4)];
        if (kind == 2) bits = (bits & 0x80ff0000u) | 0x3f000000u;          // eight bits, as of bfloat16
        if (kind == 3) bits = (bits & 0x81ffffffu) | 0x3f000000u;          // around 1
        if (kind == 4) bits = (bits & 0x807fffffu) | (bits >> 3 & 7) << 23;  // subnormal, or almost
        lane = as_float(bits);
    }
    return load_f32(lanes);
}
constexpr int kKinds = 5;

i32x16 integers(uint32_t mask = 0xffffffff) {
    uint32_t lanes[kLanes];
    for (uint32_t& lane : lanes) lane = random_bits() & mask;
    return load_i32(lanes);
}

constexpr int kTurns = 400;

template <class Function>
void report(const char* name, const Function& function) {
    Digest digest;
    state = 88172645463325252u;
    for (int turn = 0; turn < kTurns; turn++) function(digest, turn % kKinds);
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(digest.hash));
}

#define UNARY(function) report(#function, [](Digest& digest, int kind) { digest.add(function(floats(kind))); });
#define BINARY(function) \
    report(#function, [](Digest& digest, int kind) { \
        const f32x16 a = floats(kind), b = floats(kind); \
        digest.add(function(a, b)); \
    });
#define TERNARY(function) \
    report(#function, [](Digest& digest, int kind) { \
        const f32x16 a = floats(kind), b = floats(kind), c = kind == 3 ? sub(zero_f32(), mul(a, b)) : floats(kind); \
        digest.add(function(a, b, c)); \
    });
#define INTEGERS(name, expression) \
    report(name, [](Digest& digest, int) { \
        const i32x16 a = integers(), b = integers(), c = integers(); \
        static_cast<void>(b), static_cast<void>(c); \
        digest.add(expression); \
    });

void report_floats() {
    BINARY(add) BINARY(sub) BINARY(mul) BINARY(div) BINARY(max) BINARY(min) BINARY(add_pairs_f32)
    UNARY(sqrt) UNARY(abs) UNARY(exp) UNARY(sigmoid) UNARY(silu) UNARY(softplus) UNARY(as_bf16)
    TERNARY(fma) TERNARY(fnma)
    report("exp2", [](Digest& digest, int kind) { digest.add(exp2(min(set_f32(126.0f), floats(kind)))); });
    report("reciprocal", [](Digest& digest, int) { digest.add(reciprocal(abs(floats(3)))); });
    report("select", [](Digest& digest, int kind) {
        const f32x16 a = floats(kind), b = floats(kind), c = floats(1), d = floats(1);
        digest.add(select_less(a, b, c, d)), digest.add(select_nan(c, a, b));
        digest.add(less_bits(a, b)), digest.add(less_bits(c, d));
    });
    report("set", [](Digest& digest, int kind) {
        float lanes[kLanes];
        store_f32(lanes, floats(kind));
        digest.add(set_f32(lanes[0])), digest.add(set_f32(-0.0f)), digest.add(zero_f32());
        digest.add(set_i32(static_cast<int32_t>(random_bits()))), digest.add(zero_i32());
    });
    report("lanes", [](Digest& digest, int kind) {
        const f32x16 x = floats(kind);
        digest.add_float(sum_lanes(x));
        if (kind != 1) digest.add_float(max_lane(select_nan(x, zero_f32(), x)));
    });
    report("conversions", [](Digest& digest, int kind) {
        const f32x16 x = mul(floats(3), set_f32(kind == 0 ? 0.5f : 1000.25f));
        digest.add(round_to_i32(x)), digest.add(truncate_to_i32(x)), digest.add(to_f32(integers()));
        uint16_t half[2 * kLanes];
        store_f16(half, kind == 1 ? floats(1) : mul(floats(3), set_f32(kind == 2 ? 1e-6f : 1.0f)));
        for (int i = 0; i < kLanes; i++) digest.add((half[i] & 0x7fff) > 0x7c00 ? 0x7e00u : half[i]);
        const f32x16 more = floats(kind);
        store_bf16(half, floats(kind), more);
        for (uint16_t one : half) digest.add((one & 0x7fff) > 0x7f80 ? 0x7fc0u : one);
        for (uint16_t& one : half) one = static_cast<uint16_t>(random_bits());
        float pair[2];
        std::memcpy(pair, half, sizeof pair);
        digest.add(load_f16(half)), digest.add(load_bf16(half)), digest.add(set_pairs_f32(pair));
    });
}

void report_integers() {
    INTEGERS("add_i32", add(a, b)) INTEGERS("sub_i32", sub(a, b)) INTEGERS("max_i32", max(a, b))
    INTEGERS("min_i32", min(a, b)) INTEGERS("bits", bit_or(bit_and(a, b), c))
    INTEGERS("shifts", add(add(shift_left<5>(a), shift_right<7>(b)), shift_right_signed<9>(c)))
    INTEGERS("shifts_by", add(shift_right(a, bit_and(b, set_i32(31))), rotate_left(a, set_i32(3))))
    INTEGERS("dot_i16", dot_i16(shift_right<8>(a), shift_right<1>(b), c))
    INTEGERS("dot_u8_i8", dot_u8_i8(shift_right<8>(a), b, c))
    INTEGERS("pairs", add_pairs_i16(a, add_i16(pairs_u8_i8(bit_and(b, set_i32(0x3f3f3f3f)), c),
                                               pairs_u8_i8(bit_and(c, set_i32(0x1f1f1f1f)), b))))
    report("others_i32", [](Digest& digest, int) {
        const i32x16 a = integers(), b = integers();
        i32x16 first, last;
        zip(a, b, first, last), digest.add(first), digest.add(last);
        digest.add(static_cast<uint32_t>(sum_lanes(a))), digest.add(static_cast<uint32_t>(max_lane(b)));
        uint8_t bytes[64];
        store_i32(bytes, a);
        digest.add(widen_u16(bytes)), digest.add(widen_i16(bytes + 2)), digest.add(widen_u8(bytes + 1));
        digest.add(widen_i8(bytes + 3)), digest.add(dot_u8_i8(shift_right<8>(a), b, bytes + 5));
        narrow_i16(bytes, b), narrow_i8(bytes + 32, a), digest.add(bytes, 12);
        const auto small = [](i32x16 x) { return shift_right_signed<24>(x); };
        digest.add(narrow_i8(small(a), small(b), small(first), small(last)));
        int64_t wide[kLanes];
        store_i64<16>(wide, a, b), digest.add(wide, 2 * kLanes);
    });
    // What only some bodies have, on which others agree.
    report("dot_bf16", [](Digest& digest, int kind) {
        const i32x16 a = bits_as_i32(floats(kind == 2 ? 2 : 3)), b = bits_as_i32(floats(3));
        digest.add(dot_bf16(floats(3), a, b));
    });
}

}  // namespace

int main() {
    report_floats();
    report_integers();
}
