// A linear map in parts, for kernels that share out the work of several maps among the threads themselves.
#pragma once

#include "ops.h"

namespace penstock {
namespace PENSTOCK_ISA {

int64_t linear_scratch_bytes(const Weight&, int64_t tokens);

// Panels of a weight: parts that can be multiplied apart.
int64_t linear_panels(const Weight&);

// Rows of x that stay in a core's cache, once prepared, while panels pass.
int64_t linear_most_rows(const Weight&);

const uint8_t* linear_panel_data(const Weight&, int64_t panel);

// Bring row `from` of x into the kind's form, as row `token` of those that are multiplied.
void linear_prepare(const LinearArgs&, int64_t from, int64_t token);

// Multiply the prepared rows, `tokens` of them, with one panel; what lies at `next` is fetched for what follows.
void linear_panel(const LinearArgs&, int64_t panel, const uint8_t* next);

}  // namespace PENSTOCK_ISA
}  // namespace penstock
