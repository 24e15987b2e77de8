"""Functions of several ops: the bytes of the ops one after another, forward and backward."""

import gc
import weakref

import pytest
import torch
from torch import nn

from rl_consistency.kernels.glu.op import glu
from rl_consistency.kernels.gradient_fold.op import GradientBuffer
from rl_consistency.kernels.linear import joined
from rl_consistency.kernels.linear.joined import HeadNorm, Projection, attention_inputs, gated_mlp
from rl_consistency.kernels.linear.op import linear
from rl_consistency.kernels.rms_norm.op import rms_norm
from rl_consistency.kernels.rotary.op import rotary, rotary_table
from rl_consistency.parity.digest import first_difference

TOKENS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 37, 48, 4, 2, 16, 80
COLUMNS = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
EPS = 1e-6


@pytest.fixture(params=["cpu", "interpreter"])
def schedules(request, monkeypatch):
    """The CPU's, and those of a GPU in Triton's interpreter."""
    if request.param == "interpreter":
        if torch.cuda.is_available():
            pytest.skip("for the CPU interpreter")
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def drawn(*shape, dtype=torch.float32):
    values = torch.randn(*shape, dtype=torch.float32)
    # Outlier channels make sums round at many scales.
    values[..., ::7] *= 20.0
    return values.to(dtype)


class Layer:
    """Parameters of both functions with buffers of their own, and an input."""

    def __init__(self, dtype, *, bias=False, normed=True, buffered=True, frozen=()):
        torch.manual_seed(0)
        self.frozen, self.normed, self.parameters = frozen, normed, {}
        self.buffered = buffered
        self.x = drawn(1, TOKENS, WIDTH, dtype=dtype)
        self.x.requires_grad_("x" not in frozen)
        self.cos, self.sin = rotary_table(torch.rand(HEAD_DIM // 2), TOKENS)
        shapes = {name: (columns, WIDTH) for name, columns in COLUMNS.items()}
        shapes |= {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
        self.of = {
            name: self.projection(name, drawn(*shape, dtype=dtype) / 8, bias)
            for name, shape in shapes.items()
        }
        self.norms = ()
        if normed:
            self.norms = (self.norm("q_norm", HEADS, dtype), self.norm("k_norm", KV_HEADS, dtype))

    def parameter(self, name, values):
        parameter = nn.Parameter(values, requires_grad=name not in self.frozen)
        self.parameters[name] = parameter
        return parameter, GradientBuffer(parameter) if self.buffered else None

    def projection(self, name, values, bias):
        weight, weight_grad = self.parameter(name, values)
        if not bias:
            return Projection(weight, None, weight_grad, None)
        offset, bias_grad = self.parameter(f"{name}.bias", drawn(len(values)).to(values.dtype))
        return Projection(weight, offset, weight_grad, bias_grad)

    def norm(self, name, heads, dtype):
        weight, buffer = self.parameter(name, 1 + drawn(HEAD_DIM, dtype=dtype) / 64)
        return HeadNorm(weight, EPS, heads, buffer)

    def joined(self):
        q, k, v = attention_inputs(
            self.x,
            (self.of["q"], self.of["k"], self.of["v"]),
            self.norms,
            self.cos,
            self.sin,
            HEAD_DIM,
        )
        return q, k, v, gated_mlp(self.x, self.of["gate"], self.of["up"], self.of["down"])

    def apart(self):
        def project(x, name):
            weight, bias, weight_grad, bias_grad = self.of[name]
            return linear(x, weight, bias, weight_grad=weight_grad, bias_grad=bias_grad)

        q, k, v = [project(self.x, name).view(len(self.cos), -1, HEAD_DIM) for name in "qkv"]
        if self.norms:
            q, k = (
                rms_norm(x, weight, eps, rows_per_token=heads, weight_grad=buffer)
                for x, (weight, eps, heads, buffer) in zip((q, k), self.norms, strict=True)
            )
        q, k = rotary(q, k, self.cos, self.sin)
        inner = glu(project(self.x, "gate"), project(self.x, "up"))
        return q, k, v, project(inner, "down")

    def gradients(self):
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        return found if self.x.grad is None else found | {"x": self.x.grad}


def passes(layer, way, times=1, retain=False):
    """Outputs and gradients of one way through the layer, `times` forward and backward."""
    torch.manual_seed(1)
    for _ in range(times):
        outputs = dict(enumerate(getattr(layer, way)()))
        total = [(y, drawn(*y.shape, dtype=y.dtype)) for y in outputs.values() if y.requires_grad]
        for attention in (slice(0, 3), slice(3, 4)):
            ys, dys = zip(*total[attention], strict=True)
            torch.autograd.backward(ys, dys, retain_graph=retain)
            if retain:
                torch.autograd.backward(ys, dys)
    results = {f"output {i}": y.detach() for i, y in outputs.items()}
    return results | {name: g.clone() for name, g in layer.gradients().items()}


LAYERS = {
    "normed": {},
    "with biases, not normed": {"bias": True, "normed": False},
    "without buffers": {"bias": True, "buffered": False},
    "frozen weights": {"frozen": ("k", "up", "q_norm", "down")},
    "frozen input": {"frozen": ("x", "q", "gate")},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_bytes_are_those_of_the_ops(schedules, kind, dtype):
    expected = passes(Layer(dtype, **LAYERS[kind]), "apart", times=2)
    found = passes(Layer(dtype, **LAYERS[kind]), "joined", times=2)
    assert found.keys() == expected.keys() and len(found) >= 9
    assert first_difference(found, expected) is None


def test_a_graph_that_is_kept_goes_backward_twice(schedules):
    expected = passes(Layer(torch.bfloat16), "apart", retain=True)
    assert first_difference(passes(Layer(torch.bfloat16), "joined", retain=True), expected) is None


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_a_shared_parameter_are_added_as_for_the_ops(bias):
    """Without buffers autograd adds them, one by one in its dtype."""

    def gradients(way):
        layer = Layer(torch.bfloat16, bias=bias, normed=False, buffered=False)
        for name in "qv":
            layer.of[name] = layer.of["k"]
        torch.manual_seed(2)
        outputs = getattr(layer, way)()[:3]
        torch.autograd.backward(outputs, [drawn(*y.shape, dtype=y.dtype) for y in outputs])
        return layer.gradients()

    expected, found = gradients("apart"), gradients("joined")
    assert found.keys() == expected.keys() == {"x", "k"} | ({"k.bias"} if bias else set())
    assert first_difference(found, expected) is None


def test_parts_of_dx_added_in_another_order_fail_the_same_check(monkeypatch):
    backward = joined._AttentionInputs.backward

    def queries_first(ctx, *dys):
        of_v, of_k, of_q, *gradients = backward(ctx, *dys)
        return of_q, of_k, of_v, *gradients

    def dx(way):
        layer = Layer(torch.bfloat16)
        q, k, v, _ = getattr(layer, way)()
        torch.autograd.backward((q, k, v), [torch.ones_like(y) for y in (q, k, v)])
        return {"dx": layer.x.grad}

    expected = dx("apart")
    assert first_difference(dx("joined"), expected) is None
    monkeypatch.setattr(joined._AttentionInputs, "backward", staticmethod(queries_first))
    assert first_difference(dx("joined"), expected) is not None


@pytest.mark.parametrize("outputs", [(0,), (1,), (2,), (0, 2), (0, 1), (3,)])
def test_outputs_that_nobody_uses_get_no_gradient(schedules, outputs):
    def gradients(way):
        layer = Layer(torch.bfloat16, bias=True)
        used = [getattr(layer, way)()[i] for i in outputs]
        torch.autograd.backward(used, [torch.ones_like(y) for y in used])
        return layer.gradients()

    expected, found = gradients("apart"), gradients("joined")
    assert found.keys() == expected.keys()
    assert first_difference(found, expected) is None


def test_gradients_before_the_rotation_and_the_norms_are_let_go(monkeypatch):
    """Of those that the function makes itself, a projection's pass finds its own and those of the
    projections still to come."""
    layer, alive, made = Layer(torch.float32), [], []
    norm, project = joined._norm_backward, joined._project_backward

    def noted(part, dy, needs):
        made.append(weakref.ref(dy))
        dx, gradients = norm(part, dy, needs)
        made.append(weakref.ref(dx))
        return dx, gradients

    def counted(*operands):
        alive.append(sum(ref() is not None for ref in made))
        return project(*operands)

    monkeypatch.setattr(joined, "_norm_backward", noted)
    monkeypatch.setattr(joined, "_project_backward", counted)
    outputs = layer.joined()[:3]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    assert alive == [2, 2, 1]


def test_without_gradients_the_values_are_the_same(schedules):
    layer = Layer(torch.bfloat16)
    with torch.no_grad():
        expected, found = layer.apart(), layer.joined()
    assert first_difference(dict(enumerate(found)), dict(enumerate(expected))) is None
    assert not any(y.requires_grad for y in found)


def test_nothing_is_held_longer_than_the_graph():
    """Once autograd has let go of the graph, the parts hold no tensor of it."""
    layer, held = Layer(torch.bfloat16), []
    forward = joined.GLUFunction.forward

    def noted(ctx, gate, up, activation):
        y = forward(ctx, gate, up, activation)
        held.extend(weakref.ref(t) for t in (gate, up, y))
        return y

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(joined.GLUFunction, "forward", staticmethod(noted))
        y = layer.joined()[3]
    gc.disable()
    try:
        node = y.grad_fn
        assert len(node.saved_tensors) == 3 * 3 + 2
        assert not any(ref() is None for ref in held)
        del node
        y.backward(torch.ones_like(y))
        assert not any(ref() is not None for ref in held)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(torch.ones_like(y))
    finally:
        gc.enable()


def test_a_saved_tensor_changed_in_place_is_noticed():
    layer = Layer(torch.float32)
    y = layer.joined()[3]
    with torch.no_grad():
        layer.x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_derivative_is_refused():
    layer = Layer(torch.float32, buffered=False)
    y = layer.joined()[3]
    dy = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, layer.x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("broken", "error", "says"),
    [
        ({"q": torch.float16}, TypeError, "linear: weight is torch.float16 but x is"),
        ({"down": (WIDTH, INNER + 1)}, ValueError, "linear: x .* does not fit weight"),
        ({"up": (INNER + 16, WIDTH)}, ValueError, "glu: gate .* and up .* must be equal"),
        ({"k_norm": (HEAD_DIM + 1,)}, ValueError, "rms_norm: weight .* does not fit x"),
        ({"cos": (TOKENS + 1, HEAD_DIM // 2)}, ValueError, "rotary: cos .* must be"),
    ],
)
def test_bad_operands_meet_the_error_of_their_op(broken, error, says):
    layer = Layer(torch.float32)
    ((name, value),) = broken.items()
    if name == "cos":
        layer.cos = torch.zeros(value)
    elif name == "k_norm":
        layer.norms = (layer.norms[0], layer.norms[1]._replace(weight=torch.zeros(value)))
    else:
        old = layer.of[name].weight
        new = old.to(value) if isinstance(value, torch.dtype) else torch.zeros(value)
        layer.of[name] = layer.of[name]._replace(weight=new)
    with pytest.raises(error, match=says):
        layer.joined()


@pytest.mark.parametrize("way", ["apart", "joined"])
@pytest.mark.parametrize("name", "qkv")
def test_columns_that_are_no_whole_heads_are_refused(schedules, name, way):
    layer = Layer(torch.float32, normed=False)
    odd = torch.zeros(HEAD_DIM + HEAD_DIM // 2, WIDTH)
    layer.x = layer.x.detach()[:, : TOKENS - 1].requires_grad_()
    layer.cos, layer.sin = layer.cos[:-1], layer.sin[:-1]
    layer.of[name] = layer.of[name]._replace(weight=odd)
    with pytest.raises(RuntimeError, match="shape .* is invalid for input of size"):
        layer.joined() if way == "joined" else layer.apart()


@pytest.mark.parametrize("way", ["apart", "joined"])
@pytest.mark.parametrize("output", [2, 3])
def test_values_and_results_are_views_that_are_not_to_be_changed_in_place(output, way):
    y = getattr(Layer(torch.float32), way)()[output]
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.mul_(2.0)


def test_an_unknown_activation_is_refused():
    layer = Layer(torch.float32)
    with pytest.raises(ValueError, match="glu: activation 'relu'"):
        gated_mlp(layer.x, layer.of["gate"], layer.of["up"], layer.of["down"], "relu")
