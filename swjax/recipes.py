"""Recipes: the precision of each of the three matrix products of a linear layer.

With activations x [b, k], kernel w [k, n] and output gradient g [b, n], a linear layer computes::

    fwd    y  = x w      contracts k
    dgrad  dx = g wT     contracts n
    wgrad  dw = xT g     contracts b = batch x tokens

The error of a quantized product has a variance proportional to the length of the contraction. b is far larger
than k and n, so SwitchBack quantizes fwd and dgrad and *switches back* to 16 bits for wgrad.
`switchback_hadamard` also quantizes wgrad, in blocks of rotated tokens.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

from swjax import auto
from swjax.kept import KEPT_IN_LLMS as KEPT_IN_LLMS
from swjax.kernels.targets import BlockFormat

R = TypeVar("R")

QUANTIZED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
BLOCK_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
BLOCK_SCALES = ("float32", "float8_e8m0fnu", "float8_e4m3fn")
BLOCK_SCOPES = ("segment", "square", "column")  # of emulated formats
STATIC_SCOPES = ("unit", "fan_in")
WEIGHT_SCOPES = ("square", "column", "fan_in")  # of weights only
SCOPES = ("row", "channel", "tensor", "block", *STATIC_SCOPES, *BLOCK_SCOPES)
ROTATIONS = (1, 2, 4, 8, 16, 32, 64, 128)
LONGEST_INT8_SUM = 2**17  # an int32 sum holds 2**31 / 127**2 = 133,144 int8 products


@dataclass(frozen=True)
class Quantizer:
    """The quantization of one operand of a product.

    Attributes:
      dtype: "int8", "float8_e4m3fn" or "float8_e5m2"; for the scopes "segment", "square" and "column" an fp8
        format or "float4_e2m1fn".
      scope: the elements that share one scale. "row": a vector of the left operand along the contraction (a
        token); "channel": a vector of the right operand along the contraction (an output channel of that
        product); "tensor": the whole operand; "block": a column of a block of tokens, only for wgrad;
        "unit": the whole operand, with the constant scale 1, for fp8 values near 1; "fan_in": a weight [k,
        n], with a constant scale near k**-0.5, see `static_scale`;
        "segment": `block` neighbours along the contraction; "square": `block` x `block` elements of a weight;
        "column": an output channel of a weight, also in dgrad.
        Products of the last three are emulated on most chips, see `swjax.kernels.targets.block_formats`.
      block: largest number of tokens per block, or the size of a segment or square; 0 for the other scopes,
        and for segments that are whole rows.
      rotation: number of neighbours along the contraction (features, and tokens in wgrad) that an
        orthogonal matrix mixes before they are quantized, a power of two up to 128; 1 means no rotation. If
        it does not divide the features of a device, its largest power of two that does is used. See
        `swjax.kernels.rotations`.
      scale: format of the scales of segments and squares: "float32", "float8_e8m0fnu" (MX) or
        "float8_e4m3fn" (NVFP4, with one more float32 scale for the operand).
      ceil: whether scales of MX are rounded up, as in `jax.nn.scaled_matmul`, so that no value is clipped,
        instead of down, as in the OCP specification.
      stochastic: whether segments are rounded up or down at random, so that the mean is the operand, instead
        of to the nearest value. The operand seeds the random bits, see
        `swjax.kernels.block_formats.reference.random_bits`.

    Raises:
      ValueError: the dtype or the scope does not exist, or the block, the rotation or the rounding is
        invalid.
    """

    dtype: str
    scope: str
    block: int = 0
    rotation: int = 1
    scale: str = "float32"
    ceil: bool = False
    stochastic: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether the operand is in a block format."""
        return self.scope in BLOCK_SCOPES

    @property
    def block_format(self) -> BlockFormat:
        """The format of segments and squares, see `swjax.kernels.targets.block_formats`."""
        return self.dtype, self.block, self.scale

    @property
    def is_static(self) -> bool:
        """Whether the scale is a constant."""
        return self.scope in STATIC_SCOPES

    @property
    def has_one_scale(self) -> bool:
        """Whether the whole operand shares a scale, so that it is the same along each axis."""
        return self.scope == "tensor" or self.is_static

    def static_scale(self, shape: tuple[int, ...]) -> float:
        """The constant scale of a static operand of a shape: a power of two.

        Weights [k, n] that are initialized with a variance of 1 / k, as those of Flax's layers, are divided
        by their standard deviation: this is Unit Scaling, with the factor in the scale instead of in the
        parameter.

        >>> Quantizer("float8_e4m3fn", "fan_in").static_scale((1024, 64))
        0.03125

        References:
          Blake et al., "Unit Scaling", ICML 2023, https://arxiv.org/abs/2303.11257
        """
        return 1.0 if self.scope == "unit" else 2.0 ** -round(math.log2(max(shape[0], 1)) / 2)

    def __post_init__(self) -> None:
        dtypes = BLOCK_DTYPES if self.in_blocks else QUANTIZED_DTYPES[self.is_static :]
        if self.dtype not in dtypes:
            raise ValueError(
                f"Quantizer's dtype must be one of {dtypes} for {self.scope!r}, got {self.dtype!r}"
            )
        if self.scope not in SCOPES:
            raise ValueError(f"Quantizer's scope must be one of {SCOPES}, got {self.scope!r}")
        if self.rotation not in ROTATIONS:
            raise ValueError(
                f"Quantizer's rotation must be one of {ROTATIONS}, got {self.rotation}"
            )
        if self.scale not in (BLOCK_SCALES if self.in_blocks else BLOCK_SCALES[:1]):
            raise ValueError(
                f"Quantizer's scale must be float32, or one of {BLOCK_SCALES} for the scopes {BLOCK_SCOPES}, "
                f"got {self.scale!r} for {self.scope!r}"
            )
        if self.ceil and self.scale != "float8_e8m0fnu":
            raise ValueError(
                f"Quantizer(ceil=True) rounds scales in float8_e8m0fnu, got {self.scale!r}: use ceil=False"
            )
        if self.stochastic and self.scope != "segment":
            raise ValueError(
                f"Quantizer(stochastic=True) rounds segments only, got scope={self.scope!r}: "
                "use stochastic=False"
            )
        if self.is_static and self.rotation > 1:
            raise ValueError(
                f"Quantizer(scope={self.scope!r}) has a constant scale and rotates nothing, got "
                f"rotation={self.rotation}: use rotation=1, or another scope"
            )
        if self.in_blocks:
            if self.scope == "segment":
                fits = self.block >= 0
            else:
                fits = (self.block > 0) == (self.scope == "square") and self.rotation == 1
            if not fits:
                raise ValueError(
                    f"Quantizer(scope={self.scope!r}) needs a positive block, or 0 for segments and columns, "
                    f"and rotates segments only, got block={self.block} and rotation={self.rotation}"
                )
        elif self.scope != "block":
            if self.block:
                raise ValueError(
                    f"Quantizer(scope={self.scope!r}) has no blocks of tokens: use scope='block'"
                )
        elif not 0 < self.block <= LONGEST_INT8_SUM or self.block % self.rotation:
            raise ValueError(
                f"Quantizer(scope='block') needs a block that is a multiple of its rotation and at most "
                f"{LONGEST_INT8_SUM}, got rotation={self.rotation} and block={self.block}"
            )


@dataclass(frozen=True)
class Product:
    """The computation of one matrix product.

    Attributes:
      lhs, rhs: quantizers of the operands: both int8, or both floating.
      outlier_threshold: threshold in units of x. Features of x whose magnitude reaches it for any token are
        excluded from the quantized product and multiplied in 16 bits. 0 turns this off.
      outlier_quantile: for operands in block formats: each row of lhs is clipped to its elements of this and
        the opposite quantile, and the rest is multiplied in 16 bits. 0 turns this off.

    Raises:
      TypeError: an operand has no Quantizer.
      ValueError: one operand is int8 and the other fp8, one is in blocks and the other is not, their
        rotations differ, or the threshold or the quantile is out of its range.
    """

    lhs: Quantizer
    rhs: Quantizer
    outlier_threshold: float = 0.0
    outlier_quantile: float = 0.0

    @property
    def has_outliers(self) -> bool:
        """Whether a part of lhs is multiplied in 16 bits."""
        return bool(self.outlier_threshold or self.outlier_quantile)

    @property
    def in_blocks(self) -> bool:
        """Whether both operands are in block formats."""
        return self.lhs.in_blocks

    def __post_init__(self) -> None:
        for name, operand in {"lhs": self.lhs, "rhs": self.rhs}.items():
            if not isinstance(operand, Quantizer):
                raise TypeError(f"Product's {name} must be a Quantizer, got {operand!r}")
        if (self.lhs.dtype == "int8") != (self.rhs.dtype == "int8"):
            raise ValueError(
                "Product multiplies int8 with int8, or fp8 with fp8, "
                f"got {self.lhs.dtype} and {self.rhs.dtype}"
            )
        if self.lhs.in_blocks != self.rhs.in_blocks or self.lhs.scope in WEIGHT_SCOPES:
            raise ValueError(
                "Product multiplies segments with segments or squares, or neither operand is in blocks; "
                f"scopes of weights {WEIGHT_SCOPES} are for rhs, "
                f"got {self.lhs.scope} and {self.rhs.scope}"
            )
        if self.in_blocks and (self.lhs.block, self.lhs.scale) != (self.rhs.block, self.rhs.scale):
            raise ValueError(
                "Product needs the same block and format of scales for both operands, got "
                f"{self.lhs.block} {self.lhs.scale} and {self.rhs.block} {self.rhs.scale}"
            )
        rotations = {q.rotation for q in (self.lhs, self.rhs) if q.scope != "block"}
        if len(rotations) > 1:
            raise ValueError(
                "Product needs the same rotation for both operands, "
                f"got {self.lhs.rotation} and {self.rhs.rotation}"
            )
        if not self.outlier_threshold >= 0:  # also refuses NaN
            raise ValueError(
                f"Product's outlier_threshold must be at least 0, got {self.outlier_threshold}: "
                "0 turns outliers off"
            )
        quantile = self.outlier_quantile
        if quantile and not (0.5 <= quantile < 1 and self.in_blocks and not self.outlier_threshold):
            raise ValueError(
                "Product's outlier_quantile is at least 0.5 and below 1, for block formats without an "
                f"outlier_threshold, got {quantile}: 0 turns outliers off"
            )


@dataclass(frozen=True)
class Recipe:
    """The three products of a linear layer; None means the compute dtype (16 or 32 bits).

    Attributes:
      fwd: y = x w.
      dgrad: dx = g wT.
      wgrad: dw = xT g.
      save_quantized: whether to save the quantized x and w for the backward pass instead of x and w; wgrad
        then reads the dequantized x. This saves memory and costs a little accuracy. If the backward pass of a
        prologue recomputes x, no form of x is saved, and wgrad reads x itself.
      estimator: the power of the approximation of rounding whose derivative multiplies dw, see
        `swjax.kernels.block_formats.reference.estimator`; 0 for none: the derivative of rounding counts as 1.
        w must be quantized in columns.

    Raises:
      TypeError: a product is neither a Product nor None.
      ValueError: products do not fit together.
    """

    fwd: Product | None = None
    dgrad: Product | None = None
    wgrad: Product | None = None
    save_quantized: bool = False
    estimator: float = 0.0

    def __post_init__(self) -> None:
        for name, product in {"fwd": self.fwd, "dgrad": self.dgrad, "wgrad": self.wgrad}.items():
            if product is not None and not isinstance(product, Product):
                raise TypeError(f"Recipe's {name} must be a Product or None, got {product!r}")
        self._check_blocks()
        columns = self.fwd is not None and self.fwd.rhs.scope == "column"
        if self.estimator and not (self.estimator >= 1 and columns):
            raise ValueError(
                "Recipe(estimator=...) needs a power of at least 1 and a w with scope='column' in fwd, "
                f"got {self.estimator}: 0 turns it off"
            )
        if not self.save_quantized:
            return
        if self.fwd is None or self.dgrad is None:
            raise ValueError(
                "Recipe(save_quantized=True) needs quantized fwd and dgrad products: "
                "it saves the forward pass's quantized operands; set both, or save_quantized=False"
            )
        if self.fwd.outlier_threshold > 0:
            raise ValueError(
                f"Recipe(save_quantized=True) cannot keep outliers in 16 bits, got "
                f"outlier_threshold={self.fwd.outlier_threshold}: set it to 0, or save_quantized=False"
            )
        if self.fwd.in_blocks or self.dgrad.in_blocks:
            raise ValueError(
                "Recipe(save_quantized=True) saves no block formats, which each product quantizes along its "
                "own axis: set it to False"
            )
        if (rotation := max(self.fwd.lhs.rotation, self.dgrad.lhs.rotation)) > 1:
            raise ValueError(
                f"Recipe(save_quantized=True) cannot rotate features, got rotation={rotation}: each product "
                "rotates along another axis; set it to 1, or save_quantized=False"
            )

    @property
    def name(self) -> str:
        """The name in `RECIPES`; "" if there is none."""
        return next((name for name, known in RECIPES.items() if known == self), "")

    def __repr__(self) -> str:
        """Short for recipes with a name, because every layer of a printed model has one."""
        values = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"RECIPES[{self.name!r}]" if self.name else f"Recipe({', '.join(values)})"

    @property
    def quantizes_weight_once(self) -> bool:
        """Whether fwd and dgrad read the same quantized weight.

        >>> [RECIPES[name].quantizes_weight_once for name in ("switchback", "switchback_q")]
        [True, False]
        """
        if self.fwd is None or self.dgrad is None:
            return False
        rhs = self.fwd.rhs
        return rhs == self.dgrad.rhs and rhs.has_one_scale and rhs.rotation == 1

    @property
    def quantizes_gradient_once(self) -> bool:
        """Whether dgrad and wgrad read the same quantized gradient.

        >>> [RECIPES[name].quantizes_gradient_once for name in ("fp8_tensorwise", "fp8_switchback")]
        [True, False]
        """
        if self.dgrad is None or self.wgrad is None:
            return False
        lhs = self.dgrad.lhs
        return lhs == self.wgrad.rhs and lhs.has_one_scale and lhs.rotation == 1

    def rotating(self, k: int, n: int) -> "Recipe":
        """The recipe with rotations of fwd that divide k features, and of dgrad that divide n features.

        >>> RECIPES["int8_hadamard"].rotating(96, 128).fwd.lhs.rotation
        32
        """
        fwd, dgrad = (
            product and _rotating(product, math.gcd(product.lhs.rotation, length))
            for product, length in ((self.fwd, k), (self.dgrad, n))
        )
        return replace(self, fwd=fwd, dgrad=dgrad)

    def is_emulated(self, formats: tuple[BlockFormat, ...] = ()) -> bool:
        """Whether products are emulated, see `Quantizer`.

        Args:
          formats: block formats that need no emulation, those of `swjax.kernels.targets.block_formats`.

        >>> mxfp8 = (("float8_e4m3fn", 32, "float8_e8m0fnu"),)
        >>> [RECIPES[name].is_emulated(mxfp8) for name in ("mxfp8", "fp8_block128")]
        [False, True]
        """
        blocks = [p.lhs for p in (self.fwd, self.dgrad, self.wgrad) if p and p.in_blocks]
        return any(q.block_format not in formats for q in blocks)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of the operands of quantized products that are not emulated.

        >>> RECIPES["fp8_switchback"].dtypes
        ('float8_e4m3fn', 'float8_e5m2')
        """
        products = (self.fwd, self.dgrad, self.wgrad)
        operands = [q for p in products if p for q in (p.lhs, p.rhs) if not p.in_blocks]
        return tuple(sorted({q.dtype for q in operands}))

    def with_constant_weight(self) -> "Recipe":
        """The recipe of a layer that only has the quantized weight of fwd: dgrad multiplies it as it is.

        A weight that fwd rotates along k gives ``g wT`` rotated along k, see `swjax.linear.products`.

        >>> RECIPES["int8_hadamard"].with_constant_weight().dgrad.lhs.rotation
        1
        """
        return replace(self, dgrad=self.dgrad and _rotating(self.dgrad, 1))

    def implementation(self, of_model: str | None) -> str | None:
        """The implementation of a layer with this recipe, in a model that names one for all its layers.

        A layer without quantized products cannot name kernels: see `swjax.kernels.dispatch.check_products`.

        >>> RECIPES["switchback"].implementation("triton"), RECIPES["standard"].implementation("triton")
        ('triton', None)
        """
        quantizes = self.fwd or self.dgrad or self.wgrad
        return of_model if quantizes or of_model == "xla" else None

    def _check_blocks(self) -> None:
        for name, product in {"fwd": self.fwd, "dgrad": self.dgrad}.items():
            if product and "block" in (product.lhs.scope, product.rhs.scope):
                raise ValueError(
                    f"Recipe({name}=...) sums over features, but blocks contain tokens: use 'block' in wgrad"
                )
        if self.wgrad is None:
            return
        if "block" not in (self.wgrad.lhs.scope, self.wgrad.rhs.scope):
            if self.wgrad.rhs.scope in WEIGHT_SCOPES:
                raise ValueError(
                    "Recipe(wgrad=...) has no weight: use 'segment' rather than 'square', and 'unit' rather "
                    f"than 'fan_in', got {self.wgrad.rhs.scope!r}"
                )
            if self.wgrad.lhs.rotation > 1 and not self.wgrad.in_blocks:
                raise ValueError(
                    "Recipe(wgrad=...) rotates tokens in blocks only, got rotation="
                    f"{self.wgrad.lhs.rotation}: use scope='block'"
                )
            return
        blocks = {(q.scope, q.block, q.rotation) for q in (self.wgrad.lhs, self.wgrad.rhs)}
        if len(blocks) > 1 or self.wgrad.outlier_threshold:
            raise ValueError(
                "Recipe(wgrad=...) needs the same block and rotation for both operands and "
                f"outlier_threshold=0, got {self.wgrad}"
            )


def _rotated(lhs: str, rhs: str) -> Product:
    return Product(Quantizer(lhs, "block", 1024, 128), Quantizer(rhs, "block", 1024, 128))


def _rotating(product: Product, rotation: int) -> Product:
    if product.lhs.rotation == rotation:
        return product
    lhs, rhs = (replace(q, rotation=rotation) for q in (product.lhs, product.rhs))
    return replace(product, lhs=lhs, rhs=rhs)


_int8 = partial(Quantizer, "int8")
_e4m3 = partial(Quantizer, "float8_e4m3fn")
_e5m2 = partial(Quantizer, "float8_e5m2")
_BLOCK128 = _e4m3("segment", 128)
_MXFP8 = _e4m3("segment", 32, scale="float8_e8m0fnu")
_FP4 = Quantizer("float4_e2m1fn", "segment")
_FP4_WEIGHT = replace(_FP4, scope="column")
_NVFP4 = replace(_FP4, block=16, scale="float8_e4m3fn")
_ROW_TENSOR = Product(_int8("row"), _int8("tensor"))
_ROW_CHANNEL = Product(_int8("row"), _int8("channel"))


def _llm_int8(threshold: float) -> Recipe:
    outliers = Product(_int8("row"), _int8("channel"), threshold)
    return Recipe(fwd=outliers, dgrad=_ROW_CHANNEL, wgrad=outliers)


RECIPES: dict[str, Recipe] = {
    # Every product in the compute dtype: a plain linear layer.
    "standard": Recipe(),
    # SwitchBack (Alg. 1): int8 fwd and dgrad; tokens row-wise, the weight tensor-wise.
    "switchback": Recipe(fwd=_ROW_TENSOR, dgrad=_ROW_TENSOR),
    # SwitchBackM (Alg. 3): the same products, with x and w saved as int8.
    "switchback_m": Recipe(fwd=_ROW_TENSOR, dgrad=_ROW_TENSOR, save_quantized=True),
    # SwitchBackQ (Alg. 4): one scale per output channel of the weight in fwd, per input channel in dgrad.
    "switchback_q": Recipe(fwd=_ROW_CHANNEL, dgrad=_ROW_CHANNEL),
    # SwitchBack with an int8 wgrad: a Hadamard matrix rotates tokens, and blocks of tokens have scales.
    "switchback_hadamard": Recipe(
        fwd=_ROW_TENSOR, dgrad=_ROW_TENSOR, wgrad=_rotated("int8", "int8")
    ),
    # The same, and fwd and dgrad rotate features: for activations with a few large channels.
    "int8_hadamard": Recipe(
        fwd=_rotating(_ROW_TENSOR, 128),
        dgrad=_rotating(_ROW_TENSOR, 128),
        wgrad=_rotated("int8", "int8"),
    ),
    # LLM.int8(), a baseline: int8 wgrad too, without and with outlier features in 16 bits.
    "llm_int8": _llm_int8(0.0),
    "llm_int8_outlier6": _llm_int8(6.0),
    # SwitchBack in fp8: e4m3 for x and w, e5m2 for g.
    "fp8_switchback": Recipe(
        fwd=Product(_e4m3("row"), _e4m3("tensor")), dgrad=Product(_e5m2("row"), _e4m3("tensor"))
    ),
    # fp8 with one scale per tensor in all three products, a baseline.
    "fp8_tensorwise": Recipe(
        fwd=Product(_e4m3("tensor"), _e4m3("tensor")),
        dgrad=Product(_e5m2("tensor"), _e4m3("tensor")),
        wgrad=Product(_e4m3("tensor"), _e5m2("tensor")),
    ),
    # fp8 with constant scales, as in Unit Scaling: for x near 1, w near k**-0.5, and scaled losses.
    "fp8_static": Recipe(
        fwd=Product(_e4m3("unit"), _e4m3("fan_in")),
        dgrad=Product(_e5m2("unit"), _e4m3("fan_in")),
        wgrad=Product(_e4m3("unit"), _e5m2("unit")),
    ),
    # int8_hadamard in fp8.
    "fp8_hadamard": Recipe(
        fwd=_rotating(Product(_e4m3("row"), _e4m3("tensor")), 128),
        dgrad=_rotating(Product(_e5m2("row"), _e4m3("tensor")), 128),
        wgrad=_rotated("float8_e4m3fn", "float8_e5m2"),
    ),
    # fp8 as in DeepSeek-V3: a scale for 128 neighbours of x and g, and for 128 x 128 elements of w.
    "fp8_block128": Recipe(
        fwd=Product(_BLOCK128, replace(_BLOCK128, scope="square")),
        dgrad=Product(_BLOCK128, replace(_BLOCK128, scope="square")),
        wgrad=Product(_BLOCK128, _BLOCK128),
    ),
    # FP4 of arXiv 2501.17116: a scale per token and per output channel, outliers of x in 16 bits, an estimate
    # of the derivative of rounding w. The backward products are fp8.
    "fp4_dge": Recipe(
        fwd=Product(_FP4, _FP4_WEIGHT, outlier_quantile=0.99),
        dgrad=Product(_e5m2("segment"), _FP4_WEIGHT),
        wgrad=Product(_e4m3("tensor"), _e5m2("tensor")),
        estimator=5.0,
    ),
    # MXFP8 of the Open Compute Project, e4m3 for every operand.
    "mxfp8": Recipe(
        fwd=Product(_MXFP8, _MXFP8), dgrad=Product(_MXFP8, _MXFP8), wgrad=Product(_MXFP8, _MXFP8)
    ),
    # NVIDIA's NVFP4 for training: 16 x 16 elements of w, rotated tokens in wgrad, g rounded stochastically.
    "nvfp4": Recipe(
        fwd=Product(_NVFP4, replace(_NVFP4, scope="square")),
        dgrad=Product(replace(_NVFP4, stochastic=True), replace(_NVFP4, scope="square")),
        wgrad=_rotating(Product(_NVFP4, replace(_NVFP4, stochastic=True)), 16),
    ),
}


NAMES = (*RECIPES, auto.NAME)


def get(recipe: str | Recipe, *shapes: tuple[int, ...], few_rows: str = "") -> Recipe:
    """Looks up a recipe by name; returns a Recipe unchanged.

    Args:
      recipe: a name in `RECIPES`; "auto", see `swjax.auto.choose`; or a Recipe.
      *shapes: (k, n) of the weights that will follow it, for "auto".
      few_rows: see `swjax.auto.choose`.

    >>> get("switchback").wgrad is None
    True

    Raises:
      ValueError: the name does not exist.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in NAMES:  # a dict is not hashable
        raise ValueError(f"recipe must be one of {', '.join(NAMES)} or a Recipe, got {recipe!r}")
    chosen = auto.choose(*shapes, few_rows=few_rows) if recipe == auto.NAME else recipe
    return RECIPES[chosen]


def get_all(recipes: Mapping[str, str | Recipe]) -> dict[str, Recipe]:
    """Looks up the recipe of each regular expression.

    >>> get_all({".*mlp.*": "switchback"})[".*mlp.*"] == RECIPES["switchback"]
    True

    Raises:
      TypeError: `recipes` is not a mapping.
      ValueError: a name does not exist, or an expression is not a regular expression.
    """
    if not isinstance(recipes, Mapping):
        raise TypeError(
            "recipes must map regular expressions of layer paths to recipes, such as "
            f"{{r'.*mlp.*': 'switchback'}}, got {recipes!r}"
        )
    _check_patterns(recipes)
    return {pattern: get(recipe) for pattern, recipe in recipes.items()}


def first_match(
    recipes: Mapping[str, R], paths: Iterable[str], *, kind: str = "linear layer"
) -> dict[str, R]:
    """Assigns each path the recipe of the first regular expression that matches the whole path.

    `kind` is what has the paths, for the message of the error.

    >>> first_match({".*mlp.*": "switchback"}, ["0/mlp/fc1", "0/attn/q"])
    {'0/mlp/fc1': 'switchback'}

    Raises:
      ValueError: an expression matches no path, or is not a regular expression.
    """
    _check_patterns(recipes)
    paths = list(paths)
    for pattern in recipes:
        if not any(re.fullmatch(pattern, path) for path in paths):
            raise unmatched(pattern, paths, kind)
    chosen = {}
    for path in paths:
        for pattern, recipe in recipes.items():
            if re.fullmatch(pattern, path):
                chosen[path] = recipe
                break
    return chosen


def _check_patterns(patterns: Iterable[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"pattern {pattern!r} is not a regular expression: {error}; '.*' matches any text"
            ) from error


def unmatched(pattern: str, paths: Iterable[str], kind: str = "linear layer") -> ValueError:
    """The error for a regular expression that matches none of the paths; `kind` is what has the paths."""
    paths = list(paths)
    if listed := ", ".join(map(repr, paths[:20])):
        listed += f" and {len(paths) - 20} more" if len(paths) > 20 else ""
        reason = f"it must match a whole path, one of {listed}"
    elif kind == "linear layer":
        reason = "the model has none of Flax's: swjax.quantized converts layers of any kind"
    else:
        reason = "the model has none"
    return ValueError(f"pattern {pattern!r} matches no {kind}: {reason}")
