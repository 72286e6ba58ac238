// Penalties for the tokens that a sequence contains; same arithmetic as src/penstock/kernels/sampling/reference.py.
//
// Compiled once for all instruction sets: the time goes into gathering single logits, in ascending order of tokens.
#include <cstdint>
#include <cstring>

#define PENSTOCK_ISA every  // instruction set
#include "threads.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace penstock {
namespace {

// A row of logits, and the distinct tokens of its sequence with their counts. Python fills it as six int64.
struct CountedRow {
    float* logits;
    const int32_t *tokens, *totals, *answers;  // ids, ascending; counts in all; counts in the answer
    int64_t count;
    float* saved;  // receives the logits before the change, by `tokens`; or null
};
static_assert(sizeof(CountedRow) == 6 * 8, "sampling/native.py packs six columns");

struct Penalties {
    double repetition, frequency, presence, share;  // `share` is of one token in the history
};

constexpr int64_t kPart = 512;  // tokens whose logits are changed together

// `x` has the logits of the row's tokens from index `begin` on. No branch depends on a logit.
void change(float* x, const CountedRow& row, int64_t begin, int64_t count, const Penalties& penalties) {
    const int32_t *totals = row.totals + begin, *answers = row.answers + begin;
    if (const float repetition = static_cast<float>(penalties.repetition); repetition != 1.0f) {
        for (int64_t i = 0; i < count; i++) {
            const float factor = totals[i] ? repetition : 1.0f, product = x[i] * factor, quotient = x[i] / factor;
            x[i] = x[i] < 0 ? product : quotient;
        }
    }
    if (penalties.frequency != 0 || penalties.presence != 0) {
        for (int64_t i = 0; i < count; i++) {
            const double amount = penalties.frequency * answers[i] + penalties.presence;
            x[i] -= static_cast<float>(answers[i] ? amount : 0.0);
        }
    }
    if (penalties.share != 0) {
        for (int64_t i = 0; i < count; i++) x[i] -= static_cast<float>(penalties.share * totals[i]);
    }
}

void penalize_row(const CountedRow& row, const Penalties& penalties) {
    float x[kPart];
    for (int64_t begin = 0; begin < row.count; begin += kPart) {
        const int64_t count = row.count - begin < kPart ? row.count - begin : kPart;
        const int32_t* tokens = row.tokens + begin;
        for (int64_t i = 0; i < count; i++) x[i] = row.logits[tokens[i]];
        if (row.saved) std::memcpy(row.saved + begin, x, static_cast<size_t>(count) * sizeof(float));
        change(x, row, begin, count, penalties);
        for (int64_t i = 0; i < count; i++) row.logits[tokens[i]] = x[i];
    }
}

}  // namespace
}  // namespace penstock

// Change the logits of each row; all rows are different.
EXPORT void penstock_penalize(const penstock::CountedRow* rows, const penstock::Penalties* penalties, int64_t count) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < count; i++) tokens += rows[i].count;
    penstock::every::parallel(
        [&](int64_t thread, int64_t threads) {
            for (int64_t i = thread; i < count; i += threads) penstock::penalize_row(rows[i], penalties[i]);
        },
        count > 1 ? tokens * 8 : 0);
}
