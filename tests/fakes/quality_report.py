"""A result of `holdfast quality`: one quantized form, and one that the model does not support."""

from __future__ import annotations

from holdfast.models.quality import FormQuality, QualityReport

REPORT = QualityReport(
    model="tiny",
    fingerprint="f" * 64,
    measured_at="2026-11-23T19:00:00+00:00",
    mlx_version="0.32.4",
    compute_dtype="float32",
    text="built-in",
    text_tokens=900,
    quantized_tokens=500,
    questions=104,
    forms=(
        FormQuality(form="native", perplexity=4.0, kl_divergence=0.0, agreement=1.0, right=90),
        FormQuality(form="8", perplexity=4.02),
        FormQuality(form="4", refused="its heads have 48 dimensions"),
    ),
)
