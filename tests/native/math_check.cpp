// Measures the largest errors of the kernels' exponentials and hyperbolic tangent against double, over a fine grid. Compiled
// for one instruction set; prints "name error" lines.
#include FA_SIMD_HEADER

#include "common/math.hpp"

#include <cmath>
#include <cstdio>
#include <initializer_list>

using namespace FA_NAMESPACE;

namespace {

struct Errors {
    double relative = 0.0, absolute = 0.0;
};

template <class Function, class Exact>
Errors measure(double begin, double end, Function function, Exact exact) {
    constexpr int kSteps = 4000000;
    Errors errors;
    float x[Vec::kWidth], y[Vec::kWidth];
    for (int step = 0; step < kSteps; step += Vec::kWidth) {
        for (int i = 0; i < Vec::kWidth; ++i) x[i] = static_cast<float>(begin + (end - begin) * (step + i) / kSteps);
        store(y, function(load(x)));
        for (int i = 0; i < Vec::kWidth; ++i) {
            const double wanted = exact(static_cast<double>(x[i]));
            const double error = std::fabs(y[i] - wanted);
            errors.absolute = std::fmax(errors.absolute, error);
            if (wanted != 0.0) errors.relative = std::fmax(errors.relative, error / std::fabs(wanted));
        }
    }
    return errors;
}

template <class Function>
void print_special_values(const char* name, Function function) {
    const auto value_at = [&](float x) {
        float y[Vec::kWidth];
        store(y, function(broadcast(x)));
        return y[0];
    };
    std::printf("%s_of_0 %.9g\n", name, value_at(0.0f));
    std::printf("%s_of_minus_200 %.9g\n", name, value_at(-200.0f));
    std::printf("%s_of_minus_infinity %.9g\n", name, value_at(-kInfinity));
    std::printf("%s_of_nan %d\n", name, std::isnan(value_at(std::nanf(""))));
}

}  // namespace

int main() {
    const auto precise = [](Vec x) { return exp2<true>(x); };
    const auto rough = [](Vec x) { return exp2<false>(x); };
    const auto natural = [](Vec x) { return exp(x); };
    const auto exact_exp2 = [](double x) { return std::exp2(x); };
    const auto exact_exp = [](double x) { return std::exp(x); };
    const auto exact_tanh = [](double x) { return std::tanh(x); };
    std::printf("exp2 %.3g\n", measure(-125.9, 0.0, precise, exact_exp2).relative);
    std::printf("exp2_short %.3g\n", measure(-125.9, 0.0, rough, exact_exp2).relative);
    std::printf("exp %.3g\n", measure(-87.3, 0.0, natural, exact_exp).relative);
    const Errors errors = measure(-12.0, 12.0, [](Vec x) { return tanh(x); }, exact_tanh);
    std::printf("tanh %.3g\ntanh_absolute %.3g\n", errors.relative, errors.absolute);
    print_special_values("exp2", precise);
    print_special_values("exp2_short", rough);
    print_special_values("exp", natural);
}
