// A mixture of experts: each token is multiplied with the experts it was routed to; each expert's weights are read
// once.
//
//   pair       a token and one of its experts; pairs are sorted by expert, then by token: | 0 0 0 | 2 | 5 5 | ...
//   run        pairs of one expert, as many as fit in a core's cache
//   item       a run and a panel of the expert's weight, which one thread multiplies
//
// All pairs pass gate and up, then down; then each token's outputs are summed in the order of its experts' ids, so a
// token's result does not depend on the other tokens. Steps of many tokens are computed in several portions.
#include <cstring>
#include <initializer_list>

#include "linear.h"
#include "lora.h"
#include "ops.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"

namespace penstock {
namespace PENSTOCK_ISA {
namespace {

constexpr int64_t kTokens = 256, kRowsEach = 48;  // of a portion: tokens, or rows per expert on average
constexpr int64_t kSegment = 16 * kLanes;         // columns of a row that a thread sums

struct PairRun {
    int64_t expert, begin, end;
};

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Calls body(weight) for each of the experts' weights, or for the first alone if all are alike.
template <class Body>
void for_formats(const Weight* const* weights, int64_t experts, bool mixed, const Body& body) {
    for (int64_t e = 0; weights && e < experts; e++) {
        if (weights[e]) body(*weights[e]);
        if (!mixed) return;
    }
}

// Whether some of the experts may have 12 bits and others 16.
bool is_bfloat16(const Weight& weight) { return weight.kind == kWeightBFloat12 || weight.kind == kWeightBFloat16; }

// A portion's sizes, and its buffers in the scratch memory.
struct Mixture {
    const ExpertsArgs& args;
    const int64_t hidden, inner, outputs;  // columns of x; of down; rows of down
    const int64_t first_inner;             // first of this rank's columns of down's input
    const int64_t first_rows;              // rows of gate and up
    const bool is_adapted;                 // some rows have adapters
    int64_t tokens, pairs, row = 0, bytes = 0;
    int64_t most_rows = INT64_MAX;  // of a run
    uint8_t* rows;     // [pairs], `row` bytes each: the next product's input, in its weights' input format
    uint8_t* inner_x;  // [pairs, inner]: down's input
    float* outs;       // [pairs, outputs]
    PairRun* runs;
    int64_t* state;    // the number of runs, and the number of pairs of each expert
    int32_t* sources;  // [pairs]: each pair's token
    int32_t* places;   // [tokens, top_k]: the index of each pair
    float* factors;    // [pairs]: each pair's routing weight
    uint8_t* scaled;   // [pairs, hidden]: x times its factor, if weights scale the experts' input
    float* added;      // [pairs, first_rows or outputs]: the adapters' updates, if some rows have adapters
    int32_t* slots;    // [pairs]: each pair's adapter

    explicit Mixture(const ExpertsArgs& args)
        : args(args), hidden(args.gate_up[0]->columns), inner(args.down[0]->columns), outputs(args.down[0]->rows),
          first_inner(args.ranks ? own_begin(*args.ranks, inner) : 0),
          first_rows(args.gate_up[0]->rows * (args.gate && args.gate[0] ? 2 : 1)),
          is_adapted(args.adapters && args.adapters->num_runs) {
        tokens = std_min(args.tokens, std_max(kTokens, kRowsEach * args.experts / args.top_k));
        pairs = tokens * args.top_k;
        for (const Weight* const* weights : {args.gate, args.gate_up, args.down}) {
            const bool may_widen = weights && weights[0] && is_bfloat16(*weights[0]);
            for_formats(weights, args.experts, args.mixed || may_widen, [&](const Weight& weight) {
                row = std_max(row, aligned(linear_scratch_bytes(weight, 1)));
            });
            for_formats(weights, args.experts, args.mixed, [&](const Weight& weight) {
                most_rows = std_min(most_rows, linear_most_rows(weight));
            });
        }
        take(rows, pairs * row);
        take(inner_x, pairs * inner * bytes_of(args.dtype));
        take(outs, pairs * outputs);
        take(runs, pairs);
        take(state, args.experts + 1);
        take(sources, pairs);
        take(places, pairs);
        take(factors, args.scale_x ? pairs : 0);
        take(scaled, args.scale_x ? pairs * hidden * bytes_of(args.dtype) : 0);
        take(added, is_adapted ? pairs * std_max(first_rows, outputs) : 0);
        take(slots, is_adapted ? pairs : 0);
    }

    // Takes the next `count` elements of the scratch memory.
    template <class T>
    void take(T*& place, int64_t count) {
        place = args.scratch ? reinterpret_cast<T*>(args.scratch + bytes) : nullptr;
        bytes += aligned(count * static_cast<int64_t>(sizeof(T)));
    }

    int64_t num_runs() const { return state[0]; }

    // Sorts the pairs of `count` tokens from `first` on by expert.
    void group(int64_t first, int64_t count) const {
        const int64_t k = args.top_k, most = most_rows;
        const int32_t* ids = args.ids + first * k;
        int64_t *begins = state + 1, begin = 0, found = 0;
        std::memset(begins, 0, static_cast<size_t>(args.experts) * sizeof(int64_t));
        for (int64_t i = 0; i < count * k; i++) begins[ids[i]]++;
        for (int64_t expert = 0; expert < args.experts; expert++) {
            const int64_t size = begins[expert], parts = (size + most - 1) / most;
            for (int64_t part = 0; part < parts; part++)
                runs[found++] = {expert, begin + size * part / parts, begin + size * (part + 1) / parts};
            begins[expert] = begin;
            begin += size;
        }
        state[0] = found;
        for (int64_t i = 0; i < count * k; i++) {
            places[i] = static_cast<int32_t>(begins[ids[i]]++);
            sources[places[i]] = static_cast<int32_t>(first + i / k);
            if (args.scale_x) factors[places[i]] = args.weights[first * k + i];
            if (is_adapted) slots[places[i]] = args.adapters->row_slots[first + i / k];
        }
    }

    // One map of a run.
    LinearArgs map(const PairRun& run, const Weight* const* weights, const float* bias, bool is_down) const {
        const Weight& weight = *weights[run.expert];
        LinearArgs of{};
        of.weight = &weight;
        of.x = is_down ? inner_x + run.begin * inner * bytes_of(args.dtype) : args.scale_x ? scaled : args.x;
        of.x_stride = weight.columns;
        of.x_dtype = args.dtype;
        of.y = is_down ? static_cast<void*>(outs + run.begin * outputs)
                       : inner_x + (run.begin * inner + first_inner) * bytes_of(args.dtype);
        of.y_stride = is_down ? outputs : inner;
        of.y_dtype = is_down ? kFloat32 : args.dtype;
        of.tokens = run.end - run.begin;
        of.bias = bias;
        of.scratch = rows + run.begin * row;
        of.activation = kNoActivation;
        if (is_adapted) {
            of.added_stride = is_down ? outputs : first_rows;
            of.added = added + run.begin * of.added_stride;
            of.lora = (is_down ? args.down_slots : args.gate_up_slots) + run.expert;
            of.lora_stride = args.experts;
            of.row_slots = slots + run.begin;
        }
        return of;
    }

    // Compute the adapters' updates of a map for a thread's share of the pairs.
    void adapt(const LoraMaps* tables, bool is_down, int64_t begin, int64_t end) const {
        const int64_t width = is_down ? outputs : first_rows, columns = is_down ? inner : hidden;
        const uint8_t* x = is_down ? inner_x : args.scale_x ? scaled : static_cast<const uint8_t*>(args.x);
        for (const PairRun* run = runs; run < runs + num_runs(); run++) {
            for (int64_t i = std_max(begin, run->begin); i < std_min(end, run->end); i++) {
                const int64_t row = is_down || args.scale_x ? i : sources[i];
                const LoraMaps none{};
                const LoraMaps& maps = slots[i] < 0 ? none : tables[slots[i] * args.experts + run->expert];
                lora_row(maps, args.dtype, x + row * columns * bytes_of(args.dtype), columns, added + i * width, width);
            }
        }
    }

    // Convert the rows of a thread's share of the pairs to the input format of `weights`.
    void prepare(const Weight* const* weights, bool is_down, int64_t begin, int64_t end) const {
        for (const PairRun* run = runs; run < runs + num_runs(); run++) {
            const int64_t from = std_max(begin, run->begin), to = std_min(end, run->end);
            if (from >= to || !weights[run->expert]) continue;
            const LinearArgs of = map(*run, weights, nullptr, is_down);
            for (int64_t i = from; i < to; i++) {
                const int64_t row = is_down ? i - run->begin : args.scale_x ? i : sources[i];
                linear_prepare(of, row, i - run->begin);
            }
        }
    }

    // Scale x by the routing weight, for a thread's share of the pairs.
    void scale(int64_t begin, int64_t end) const {
        for (int64_t pair = begin; pair < end; pair++) {
            for (int64_t i = 0; i < hidden; i += kLanes) {
                const f32x16 x = load_some_as_f32(args.x, args.dtype, sources[pair] * hidden + i, hidden - i);
                write_row(scaled, args.dtype, pair * hidden + i, hidden - i, mul(x, set_f32(factors[pair])));
            }
        }
    }

    // Multiply every run with every panel of its expert; `finish(run, map)` completes the map, whose bias is that of the
    // expert's first row in `bias`, `bias_rows` for each expert.
    template <class Finish>
    void multiply(const Weight* const* weights, const float* bias, int64_t bias_rows, bool is_down,
                  const Finish& finish) const {
        const int64_t panels = most_panels(weights), count = num_runs() * panels;
        take_turns(count, [&](int64_t i, int64_t next) {
            const PairRun &run = runs[i / panels], &after = runs[std_min(next, count - 1) / panels];
            const Weight *weight = weights[run.expert], *next_weight = weights[after.expert];
            if (args.mixed && (!weight || i % panels >= linear_panels(*weight))) return;
            if (!next_weight || next % panels >= linear_panels(*next_weight)) next_weight = weight, next = i;
            LinearArgs of = map(run, weights, bias ? bias + run.expert * bias_rows : nullptr, is_down);
            finish(run, of);
            linear_panel(of, i % panels, linear_panel_data(*next_weight, next % panels));
        });
    }

    // Panels of the weight with the most of them.
    int64_t most_panels(const Weight* const* weights) const {
        int64_t most = 0;
        for_formats(weights, args.experts, args.mixed, [&](const Weight& weight) {
            most = std_max(most, linear_panels(weight));
        });
        return most;
    }

    // Sum columns of a token over its experts.
    void add_up(int64_t token, int64_t first, int64_t column, int64_t end) const {
        const int64_t k = args.top_k;
        const float* weights = args.weights + token * k;
        const int32_t* pairs_of = places + (token - first) * k;
        const f32x16 one = set_f32(1.0f);
        const f32x16 gate = args.shared_gate
                                ? div(one, add(one, exp(set_f32(-args.shared_gate[token]))))
                                : one;
        for (; column < end; column += kLanes) {
            const auto out = [&](int64_t i) { return load_some(outs + pairs_of[i] * outputs + column, end - column); };
            const auto weight = [&](int64_t i) { return args.scale_x ? one : set_f32(weights[i]); };
            f32x16 sum = mul(weight(0), out(0));
            for (int64_t i = 1; i < k; i++) sum = fma(weight(i), out(i), sum);
            const int64_t at = token * outputs + column;
            if (args.shared) {
                const int64_t place = token * args.shared_stride + column;
                sum = fma(gate, load_some_as_f32(args.shared, args.dtype, place, end - column), sum);
            }
            write_row(args.y, args.dtype, at, end - column, sum);
        }
    }

    // Compute `count` tokens from `first` on; called by every thread of the team. False: a rank is lost.
    bool compute(int64_t first, int64_t count, int64_t thread, int64_t threads) const {
        const auto share = [&](int64_t of, int64_t n) { return of * n / threads; };
        const int64_t size = count * args.top_k, begin = share(size, thread), end = share(size, thread + 1);
        if (thread == 0) group(first, count);
        barrier();
        if (args.scale_x) scale(begin, end);
        if (is_adapted) adapt(args.gate_up_slots, false, begin, end);
        const auto first_map = [&](const Weight* const* weights, const auto& finish) {
            prepare(weights, false, begin, end);
            barrier();
            multiply(weights, args.gate_up_bias, first_rows, false, finish);
            barrier();
        };
        if (args.gate) first_map(args.gate, [](const PairRun&, LinearArgs&) {});
        first_map(args.gate_up, [&](const PairRun& run, LinearArgs& of) {
            of.after_gate = args.gate && args.gate[run.expert];
            if (of.after_gate) {
                const int64_t gate_rows = args.gate[run.expert]->rows;
                if (of.bias) of.bias += gate_rows;
                if (of.added) of.added += gate_rows;
                of.lora_first = gate_rows;
            }
            of.activation = args.activation;
        });
        if (args.ranks && !exchange_inner(size, thread, threads)) return false;
        if (is_adapted) adapt(args.down_slots, true, begin, end);
        prepare(args.down, true, begin, end);
        barrier();
        multiply(args.down, args.down_bias, outputs, true, [](const PairRun&, LinearArgs&) {});
        barrier();
        const int64_t segments = (outputs + kSegment - 1) / kSegment;
        for (int64_t i = share(count * segments, thread); i < share(count * segments, thread + 1); i++) {
            const int64_t column = i % segments * kSegment;
            add_up(first + i / segments, first, column, std_min(column + kSegment, outputs));
        }
        barrier();
        return true;
    }

    // Gather all columns of down's input from the ranks; false: a rank is lost.
    bool exchange_inner(int64_t count, int64_t thread, int64_t threads) const {
        const int64_t size = bytes_of(args.dtype), row_bytes = inner * size;
        const ExchangeArgs all{args.ranks, inner_x + first_inner * size, row_bytes, inner_x, count, inner, size, nullptr, 0, 0};
        const bool is_met = exchange_share(all, thread, threads);
        barrier();
        return is_met;
    }
};

}  // namespace

int64_t experts_scratch_bytes(const ExpertsArgs& args) { return Mixture(args).bytes; }

void experts(const ExpertsArgs& args) {
    const Mixture mixture(args);
    parallel(
        [&](int64_t thread, int64_t threads) {
            for (int64_t first = 0; first < args.tokens; first += mixture.tokens)
                if (!mixture.compute(first, std_min(mixture.tokens, args.tokens - first), thread, threads)) return;
        },
        mixture.pairs * mixture.hidden * mixture.inner);
}

}  // namespace PENSTOCK_ISA
}  // namespace penstock
