// The library of one variant of the gradients of tokens of linear attention, chosen by the macros of a TokenGradientsConfig.
#include "token_gradients.cuh"

#include "launch.hpp"

FA_EMULATED(emulate_linear_token_gradients, fastattention_linear_token_gradients, GradientParams)
