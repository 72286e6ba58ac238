// A linear map split into panels, for kernels that divide the work of several maps among the threads themselves.
#pragma once

#include "ops.h"

namespace penstock {
namespace PENSTOCK_ISA {

int64_t linear_scratch_bytes(const Weight&, int64_t tokens);

// Panels of a weight, which can be multiplied independently.
int64_t linear_panels(const Weight&);

// Number of prepared rows of x that fit a core's cache while panels stream past.
int64_t linear_most_rows(const Weight&);

const uint8_t* linear_panel_data(const Weight&, int64_t panel);

// Convert row `from` of x to the kind's form, as prepared row `token`.
void linear_prepare(const LinearArgs&, int64_t from, int64_t token);

// Multiply the `tokens` prepared rows with one panel, prefetching from `next`, the data of the next call.
void linear_panel(const LinearArgs&, int64_t panel, const uint8_t* next);

}  // namespace PENSTOCK_ISA
}  // namespace penstock
