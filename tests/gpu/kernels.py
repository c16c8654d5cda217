"""Kernels in PTX, by hand. Each takes an address and a 32-bit number, so that one launcher serves all.

`sm_70` is the oldest architecture that MPS shares are offered on; the driver compiles for the GPU at hand.
"""

_HEAD = ".version 7.0\n.target sm_70\n.address_size 64\n"


def _kernel(name: str, body: str) -> str:
    return f"""{_HEAD}
.visible .entry {name}(.param .u64 address, .param .u32 number)
{{
    .reg .pred %p<2>;
    .reg .f32 %f<3>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd0, [address];
    cvta.to.global.u64 %rd0, %rd0;
    ld.param.u32 %r0, [number];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
{body}
    ret;
}}
"""


# `number` rounds of four dependent multiply-adds in each thread: a fixed amount of work, which a context that
# is switched away does not get on with, as a wait for a clock would. One word per thread is written.
WORK = _kernel(
    "work",
    """
    mov.f32 %f0, 0f3F800000;
    mov.f32 %f1, 0f3F7FFFFF;
    mov.u32 %r5, 0;
AGAIN:
    fma.rn.f32 %f0, %f0, %f1, %f1;
    fma.rn.f32 %f0, %f0, %f1, %f1;
    fma.rn.f32 %f0, %f0, %f1, %f1;
    fma.rn.f32 %f0, %f0, %f1, %f1;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p0, %r5, %r0;
    @%p0 bra AGAIN;
    mul.wide.u32 %rd1, %r4, 4;
    add.u64 %rd2, %rd0, %rd1;
    st.global.f32 [%rd2], %f0;
""",
)

# Adds 1 to each of `number` words: bound by memory once they exceed the cache.
STREAM = _kernel(
    "stream",
    """
    mov.u32 %r5, %nctaid.x;
    mul.lo.u32 %r5, %r5, %r2;
AGAIN:
    setp.ge.u32 %p0, %r4, %r0;
    @%p0 bra DONE;
    mul.wide.u32 %rd1, %r4, 4;
    add.u64 %rd2, %rd0, %rd1;
    ld.global.u32 %r6, [%rd2];
    add.u32 %r6, %r6, 1;
    st.global.u32 [%rd2], %r6;
    add.u32 %r4, %r4, %r5;
    bra AGAIN;
DONE:
""",
)

# Each block writes the number of its multiprocessor, after `number` rounds of waiting so that no
# multiprocessor is done before all have been given a block.
WHERE = _kernel(
    "where",
    """
    mov.u32 %r5, 0;
AGAIN:
    nanosleep.u32 1000;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p0, %r5, %r0;
    @%p0 bra AGAIN;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra DONE;
    mov.u32 %r6, %smid;
    mul.wide.u32 %rd1, %r1, 4;
    add.u64 %rd2, %rd0, %rd1;
    st.global.u32 [%rd2], %r6;
DONE:
""",
)

# Writes where nothing is mapped: the fatal error that takes all clients of a server down.
POKE = _kernel("poke", "    st.global.u32 [%rd0], %r0;")

# The same with a variable of 2 MiB: the code of a small module has room in the context, and takes nothing.
STATIC = POKE.replace(".visible .entry", ".visible .global .align 8 .b8 large[2097152];\n.visible .entry")


# Of sharing.c: the body of each, under a name that says how long it is meant to run.
_SHARING = {
    "weights_200us": (STREAM, "stream"),
    "attention_50us": (WORK, "work"),
    "prefill_5ms": (WORK, "work"),
    "train_2ms": (WORK, "work"),
    "nothing_1us": (WORK, "work"),
}


def sharing() -> dict[str, str]:
    """The texts that sharing.c loads, by name."""
    return {
        name: text.replace(f".entry {entry}(", f".entry {name}(") for name, (text, entry) in _SHARING.items()
    }
