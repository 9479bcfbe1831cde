/* Many steps of Adam over float32 elements, a chunk at a time, which stays in the cache meanwhile.

The arithmetic is that of torch's loop over tensors, operation by operation, each rounded on its
own, but for what torch's own build decides:
  - whether a multiplication and an addition are rounded once (fused) or twice: bit 0 of `fused` for
    the first moment, bit 1 for the second;
  - the square root. Where torch has MKL, its float32 square root is MKL's, which is not correctly
    rounded; then `root` is the address of vmsSqrt. 0: the processor's.
adam.py finds out by comparing with torch, and does without this file where nothing fits.
*/

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#define WIDE __attribute__((target("avx2,fma")))
#define HAS_WIDE() (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#else
#define WIDE
#define HAS_WIDE() 1
#endif

#define CHUNK 1024

/* torch's mode: high accuracy, denormals kept, errors ignored */
#define VML_MODE (0x2 | 0x140000 | 0x100)

typedef void (*Root)(int64_t, const float *, float *, int64_t);

/* One step over a parameter. adam.py makes a NumPy array of them. */
typedef struct {
    uint64_t at;     /* address of int64: where values are, ascending, in the whole parameter */
    uint64_t values; /* address of float32: those; without alignment */
    int64_t count;   /* of them; -1: the values of all elements at hand, in order; `at` is not read */
    float weight, beta2, square, decay, correction, eps, size, unused;
} Step;

#define MOMENTS(NAME, FIRST, SECOND)                                                            \
    WIDE static void NAME(float *restrict m, float *restrict v, float *restrict w,              \
                          const float *restrict g, Py_ssize_t count, float weight, float beta2, \
                          float square)                                                         \
    {                                                                                           \
        for (Py_ssize_t i = 0; i < count; i++) {                                                \
            float grad = g[i], before = m[i], second = v[i] * beta2;                            \
            float gap = grad - before, scaled = square * grad;                                  \
            m[i] = FIRST;                                                                       \
            v[i] = SECOND;                                                                      \
            w[i] = v[i] == 0 ? 1 : v[i];                                                        \
        }                                                                                       \
    }

MOMENTS(moments_00, before + weight * gap, second + scaled * grad)
MOMENTS(moments_01, __builtin_fmaf(weight, gap, before), second + scaled * grad)
MOMENTS(moments_10, before + weight * gap, __builtin_fmaf(scaled, grad, second))
MOMENTS(moments_11, __builtin_fmaf(weight, gap, before), __builtin_fmaf(scaled, grad, second))

typedef void (*Moments)(float *, float *, float *, const float *, Py_ssize_t, float, float, float);
static const Moments all_moments[] = {moments_00, moments_01, moments_10, moments_11};

WIDE static void own_root(int64_t count, const float *v, float *r, int64_t mode)
{
    (void)mode;
    for (int64_t i = 0; i < count; i++)
        r[i] = sqrtf(v[i]);
}

WIDE static void move(float *restrict p, const float *restrict m, const float *restrict v,
                      const float *restrict r, Py_ssize_t count, float decay, float correction,
                      float eps, float size)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        float root = v[i] == 0 ? v[i] : r[i];
        p[i] = p[i] * decay + size * m[i] / (root / correction + eps);
    }
}

static int64_t first_from(const int64_t *at, int64_t count, int64_t least)
{
    int64_t low = 0;
    while (low < count) {
        int64_t middle = low + (count - low) / 2;
        if (at[middle] < least)
            low = middle + 1;
        else
            count = middle;
    }
    return low;
}

static void one_chunk(float *p, float *m, float *v, int64_t begin, int64_t start, Py_ssize_t length,
                      const Step *steps, Py_ssize_t count, int64_t *next, Moments moments, Root root)
{
    float g[CHUNK], w[CHUNK];
    memset(g, 0, sizeof g);
    for (Py_ssize_t k = 0; k < count; k++) {
        const Step *step = steps + k;
        const char *values = (const char *)(uintptr_t)step->values;
        const int64_t *at = (const int64_t *)(uintptr_t)step->at;
        int64_t first = next[k], last = first;
        if (step->count < 0)
            memcpy(g, values + (start - begin) * sizeof *g, length * sizeof *g);
        for (; last < step->count && at[last] < start + length; last++)
            if (at[last] >= start)
                memcpy(g + (at[last] - start), values + last * sizeof *g, sizeof *g);
        next[k] = last;
        moments(m, v, w, g, length, step->weight, step->beta2, step->square);
        root(length, w, w, VML_MODE);
        move(p, m, v, w, length, step->decay, step->correction, step->eps, step->size);
        if (step->count < 0)
            memset(g, 0, sizeof g);
        for (int64_t i = first; i < last; i++)
            if (at[i] >= start)
                g[at[i] - start] = 0;
    }
}

static PyObject *fold(PyObject *module, PyObject *args)
{
    Py_ssize_t p, m, v, length;
    int64_t start;
    long long begin;
    Py_buffer given;
    int fused;
    Py_ssize_t address;
    if (!PyArg_ParseTuple(args, "nnnLny*in", &p, &m, &v, &begin, &length, &given, &fused, &address))
        return NULL;
    const Step *steps = given.buf;
    Py_ssize_t count = given.len / (Py_ssize_t)sizeof *steps;
    int64_t *next = PyMem_New(int64_t, count);
    if (next == NULL) {
        PyBuffer_Release(&given);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    Root root = address ? (Root)(uintptr_t)address : own_root;
    for (Py_ssize_t k = 0; k < count; k++)
        next[k] = first_from((const int64_t *)(uintptr_t)steps[k].at, steps[k].count, begin);
    for (Py_ssize_t i = 0; i < length; i += CHUNK) {
        start = begin + i;
        Py_ssize_t some = length - i < CHUNK ? length - i : CHUNK;
        one_chunk((float *)p + i, (float *)m + i, (float *)v + i, begin, start, some, steps, count,
                  next, all_moments[fused & 3], root);
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(next);
    PyBuffer_Release(&given);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"fold", fold, METH_VARARGS,
     "fold(p, m, v, start, length, steps, fused, root): addresses of parameters and moments, of "
     "which the first element is number `start` of the whole; an array of Step."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_adam", .m_methods = methods,
    .m_doc = "Adam over a range of elements; everystep.recovery.adam says when it may be used.",
};

PyMODINIT_FUNC PyInit__adam(void)
{
    if (!HAS_WIDE()) {
        PyErr_SetString(PyExc_ImportError, "this processor has no fused multiply-add");
        return NULL;
    }
    return PyModule_Create(&definition);
}
