/* Training kernels that plain tensor code is slow at: Sinkhorn of 4x4 matrices and clamped SwiGLU.
 *
 * Sinkhorn works on LANES matrices at a time, entry by entry, so that the compiler vectorises over
 * matrices. The backward pass computes the iterations again and keeps them in cache.
 */

#include <math.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LANES 16
#define MAX_HALF_STEPS 63

typedef struct {
    float y[16][LANES];
    float inverse[4][LANES];
} HalfStep;

static inline int entry(int by_column, int group, int member) {
    return by_column ? member * 4 + group : group * 4 + member;
}

static void normalise(const float x[16][LANES], HalfStep *out, int by_column, float eps) {
    for (int g = 0; g < 4; g++) {
        for (int t = 0; t < LANES; t++) {
            float sum = eps;
            for (int m = 0; m < 4; m++) sum += x[entry(by_column, g, m)][t];
            out->inverse[g][t] = 1.0f / sum;
        }
        for (int m = 0; m < 4; m++)
            for (int t = 0; t < LANES; t++)
                out->y[entry(by_column, g, m)][t] =
                    x[entry(by_column, g, m)][t] * out->inverse[g][t];
    }
}

static void normalise_backward(float grad[16][LANES], const HalfStep *step, int by_column) {
    for (int g = 0; g < 4; g++) {
        float dot[LANES];
        for (int t = 0; t < LANES; t++) {
            dot[t] = 0.0f;
            for (int m = 0; m < 4; m++) {
                int e = entry(by_column, g, m);
                dot[t] += grad[e][t] * step->y[e][t];
            }
        }
        for (int m = 0; m < 4; m++)
            for (int t = 0; t < LANES; t++) {
                int e = entry(by_column, g, m);
                grad[e][t] = (grad[e][t] - dot[t]) * step->inverse[g][t];
            }
    }
}

static void load(float to[16][LANES], const float *from, long first, long count) {
    for (int t = 0; t < LANES; t++)
        for (int e = 0; e < 16; e++)
            to[e][t] = from[(first + (t < count ? t : 0)) * 16 + e];
}

static void store(float *to, const float from[16][LANES], long first, long count) {
    for (int t = 0; t < count; t++)
        for (int e = 0; e < 16; e++) to[(first + t) * 16 + e] = from[e][t];
}

/* Half steps alternate column, row, column, ...: the first and the last are columns. */
void sinkhorn_forward(const float *in, float *out, long num, int num_half_steps, float eps) {
#pragma omp parallel for schedule(static)
    for (long first = 0; first < num; first += LANES) {
        long count = num - first < LANES ? num - first : LANES;
        float x[16][LANES];
        HalfStep a, b;
        load(x, in, first, count);
        normalise(x, &a, 1, eps);
        for (int s = 1; s + 1 < num_half_steps; s += 2) {
            normalise(a.y, &b, 0, eps);
            normalise(b.y, &a, 1, eps);
        }
        store(out, a.y, first, count);
    }
}

void sinkhorn_backward(const float *in, const float *grad_out, float *grad_in, long num,
                       int num_half_steps, float eps) {
#pragma omp parallel for schedule(static)
    for (long first = 0; first < num; first += LANES) {
        long count = num - first < LANES ? num - first : LANES;
        float x[16][LANES], grad[16][LANES];
        HalfStep steps[MAX_HALF_STEPS];
        load(x, in, first, count);
        load(grad, grad_out, first, count);
        normalise(x, &steps[0], 1, eps);
        for (int s = 1; s < num_half_steps; s++)
            normalise(steps[s - 1].y, &steps[s], s % 2 == 0, eps);
        for (int s = num_half_steps - 1; s >= 0; s--)
            normalise_backward(grad, &steps[s], s % 2 == 0);
        store(grad_in, grad, first, count);
    }
}

/* gate_up is [num, 2 * width]: gate first. */
void swiglu_forward(const float *gate_up, float *out, long num, long width, float limit) {
#pragma omp parallel for schedule(static)
    for (long n = 0; n < num; n++) {
        const float *g = gate_up + n * 2 * width, *u = g + width;
        float *o = out + n * width;
        for (long i = 0; i < width; i++) {
            float gate = g[i] < limit ? g[i] : limit;
            float up = u[i] < -limit ? -limit : (u[i] < limit ? u[i] : limit);
            o[i] = gate / (1.0f + expf(-gate)) * up;
        }
    }
}

void swiglu_backward(const float *gate_up, const float *grad_out, float *grad, long num, long width,
                     float limit) {
#pragma omp parallel for schedule(static)
    for (long n = 0; n < num; n++) {
        const float *g = gate_up + n * 2 * width, *u = g + width, *d = grad_out + n * width;
        float *dg = grad + n * 2 * width, *du = dg + width;
        for (long i = 0; i < width; i++) {
            float gate = g[i] < limit ? g[i] : limit;
            float up = u[i] < -limit ? -limit : (u[i] < limit ? u[i] : limit);
            float sigmoid = 1.0f / (1.0f + expf(-gate));
            float slope = sigmoid * (1.0f + gate * (1.0f - sigmoid));
            dg[i] = g[i] < limit ? d[i] * up * slope : 0.0f;
            du[i] = u[i] > -limit && u[i] < limit ? d[i] * gate * sigmoid : 0.0f;
        }
    }
}

#ifdef __cplusplus
}
#endif
