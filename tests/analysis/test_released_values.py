"""What released names stand for: epsilons in parts of 256, the size of images; and how values are shown to people."""

from pathlib import Path

import pytest

from smoothadv.analysis.shared.hyper_parameters import display, parameters_of, released_epsilon


@pytest.mark.parametrize(
    "text, epsilon",
    [("64", 0.25), ("127", 127 / 256), ("255", 255 / 256), ("512", 2.0), ("2048", 8.0), ("0", 0.0)]
    + [("0.25", 0.25), ("2.0", 2.0), ("0.0", 0.0)],
)
def test_released_whole_numbers_count_in_parts_of_256(text, epsilon):
    assert released_epsilon(text) == epsilon


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("sigma", 0.25, "0.25"),
        ("sigma", 0.5, "0.50"),
        ("sigma", 1.0, "1.00"),
        *(("epsilon", k / 256, text) for k, text in zip((64, 127, 255, 512), ("0.25", "0.5", "1", "2"))),
        ("epsilon", 0.4961, "0.4961"),
        ("epsilon", 0.496, "0.496"),
        ("alpha", 0.001, "0.001"),
        ("alpha", 1e-5, "1e-05"),
        ("N", 100_000, "100,000"),
        ("num_noise_vec", 1024, "1024"),
        ("num_steps", 10, "10"),
        ("attack", "PGD", "PGD"),
        ("attack", None, "–"),
    ],
)
def test_values_are_shown_as_people_write_them(name, value, text):
    assert display(name, value) == text


@pytest.mark.parametrize(
    "path, stated, dimension",
    [
        ("cifar10/sigma_0.25", {}, 3072),
        ("imagenet32/sigma_0.25", {}, 3072),
        ("imagenet/sigma_0.25", {}, 150_528),
        ("digits/sigma_0.25", {}, 64),
        ("sigma_0.25", {}, None),
        ("cifar10/sigma_0.25", {"dimension": 100}, 100),
    ],
)
def test_dimension_of_an_image_follows_from_the_dataset_unless_stated(path, stated, dimension):
    assert parameters_of("certification", Path(path), stated).dimension == dimension
