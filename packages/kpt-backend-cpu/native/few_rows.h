// Grouped products where experts have few rows, so that reading the weights takes the time.
#pragma once

#include "kpt_cpu.h"

namespace kpt {

bool serves_few_rows(const struct kpt_grouped_mm& args);

int grouped_mm_few_rows(const struct kpt_grouped_mm& args);

}  // namespace kpt
