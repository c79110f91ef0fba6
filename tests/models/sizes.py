"""Small sizes of every model: a few blocks, but every kind of block, few channels and small images."""

from typing import Any

SMALL: dict[str, dict[str, Any]] = {
    "bert": {"batch_size": 4, "sequence_length": 32, "width": 32, "heads": 2, "layers": 2},
    "cnn": {"batch_size": 64},
    "densenet121": {"batch_size": 4, "image_size": 32, "classes": 10, "width": 8, "blocks": [6, 2, 1, 1]},
    "gpt": {"batch_size": 4, "sequence_length": 32, "width": 32, "heads": 2, "layers": 2},
    "gpt_scan": {"batch_size": 4, "sequence_length": 32, "width": 32, "heads": 2, "layers": 2},
    "inceptionv3": {"batch_size": 4, "image_size": 75, "classes": 10, "width": 8, "blocks": [1, 1, 1]},
    "inceptionv4": {"batch_size": 4, "image_size": 75, "classes": 10, "width": 8, "blocks": [1, 1, 1]},
    "mlp": {"batch_size": 64},
    "resnet50": {"batch_size": 4, "image_size": 32, "classes": 10, "width": 8, "blocks": [1, 2, 1, 1]},
    "vgg16": {"batch_size": 4, "image_size": 32, "classes": 10, "width": 8, "blocks": [1, 2, 1, 1, 1]},
}
