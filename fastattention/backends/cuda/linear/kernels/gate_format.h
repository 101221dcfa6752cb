// Codes of the dtypes of gates, in parameters of kernels. Python reads them.
#pragma once

enum GateFormat { kFloat32Gates = 0, kFloat16Gates = 1, kBfloat16Gates = 2 };
