"""Models that other libraries ship, as they are: value and gradient are the whole batch's."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_accum
from tests.rows.against import farthest

pytestmark = pytest.mark.usefixtures("rank_promotion")

# The smallest model of each family of Keras, on the smallest images that it takes.
SMALLEST = {
    "convnext": ("ConvNeXtTiny", 32),
    "densenet": ("DenseNet121", 32),
    "efficientnet": ("EfficientNetB0", 32),
    "efficientnet_v2": ("EfficientNetV2B0", 32),
    "inception_resnet_v2": ("InceptionResNetV2", 75),
    "inception_v3": ("InceptionV3", 75),
    "mobilenet": ("MobileNet", 32),
    "mobilenet_v2": ("MobileNetV2", 32),
    "mobilenet_v3": ("MobileNetV3Small", 32),
    "nasnet": ("NASNetMobile", 32),
    "resnet": ("ResNet50", 32),
    "resnet_v2": ("ResNet50V2", 32),
    "vgg16": ("VGG16", 32),
    "vgg19": ("VGG19", 32),
    "xception": ("Xception", 71),
}
NORMS = 16  # of a deeper model the first: each norm is a loop of its own, and takes time to compile


@pytest.fixture
def keras(monkeypatch, x64):
    """Keras on JAX, in 64 bits, where a fault is no rounding; its norms are in 32 unless they are told."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="pip install --group ecosystem")
    dtypes = importlib.import_module("keras.src.backend.common.dtypes")
    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    yield keras
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def first_layers(keras, model):
    """The model, or what leads to the last of its first norms, with a head."""
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    if len(norms) <= NORMS:
        return model
    pooled = keras.layers.GlobalAveragePooling2D()(norms[NORMS - 1].output)
    return keras.Model(model.inputs, keras.layers.Dense(3)(pooled))


@pytest.mark.sweep
def test_every_family_of_keras_is_here(keras):
    models = inspect.getmembers(keras.applications, inspect.isfunction)
    assert {fun.__module__.split(".")[-1] for _, fun in models} == set(SMALLEST)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in Keras, of NumPy 2
@pytest.mark.parametrize("family", SMALLEST)
def test_a_family_of_keras_has_the_gradient_of_the_whole_batch(family, keras):
    """Five images in two micro-batches, in training: with dropout and BatchNorm, whose statistics come out."""
    name, size = SMALLEST[family]
    shape = {"input_shape": (size, size, 3), "classes": 3, "classifier_activation": None}
    model = first_layers(keras, getattr(keras.applications, name)(weights=None, **shape))
    params, state = ([leaf.value for leaf in of] for of in (model.trainable_variables, model.non_trainable_variables))
    random = np.random.default_rng(0)
    batch = {"x": jnp.asarray(random.uniform(0, 255, (5, size, size, 3))), "y": jnp.asarray([0, 1, 2, 1, 0])}

    def loss(params, batch):
        logits, new = model.stateless_call(params, state, batch["x"], training=True)
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["y"]]), new

    ways = jax.value_and_grad(loss, has_aux=True), optax_accum.value_and_grad(loss, 2, has_aux=True)
    want, got = (jax.jit(way)(params, batch) for way in ways)
    assert farthest(got, want) < 1e-10
