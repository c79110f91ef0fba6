"""The paper's own figures: RTX A6000, batch 16 (TENSILE, section V, tables I to IV)."""

from typing import NamedTuple

MODELS = ("vgg16", "inceptionv3", "inceptionv4", "resnet50", "densenet121")
TITLES = {
    "vgg16": "VGG-16",
    "inceptionv3": "InceptionV3",
    "inceptionv4": "InceptionV4",
    "resnet50": "ResNet-50",
    "densenet121": "DenseNet-121",
}


class Figures(NamedTuple):
    """Memory saving rate, extra overhead rate."""

    msr: float
    eor: float

    @property
    def cbr(self) -> float:
        """Cost-benefit rate."""
        return self.msr / self.eor


# Table I: the whole, the cold start, after updating
PHASES = {
    "vgg16": (Figures(0.2670, 1.6287), Figures(0.2670, 6.0128), Figures(0.3192, 1.2475)),
    "inceptionv3": (Figures(0.4361, 1.6468), Figures(0.4361, 3.1128), Figures(0.4788, 1.4839)),
    "inceptionv4": (Figures(0.5154, 1.4281), Figures(0.5154, 2.6727), Figures(0.5558, 1.2898)),
    "resnet50": (Figures(0.4258, 1.5540), Figures(0.4258, 3.5395), Figures(0.4647, 1.3813)),
    "densenet121": (Figures(0.5135, 1.1678), Figures(0.5135, 2.2532), Figures(0.5236, 1.0664)),
}


class FirstIteration(NamedTuple):
    """EOR of the first iteration of TENSILE and of Capuchin, and the seconds that TENSILE's predictions take."""

    tensile: float
    capuchin: float
    prediction_s: float


# Table II
FIRST = {
    "vgg16": FirstIteration(1.2523, 5.8053, 1.3549),
    "inceptionv3": FirstIteration(1.4744, 6.7529, 1.4743),
    "inceptionv4": FirstIteration(1.3797, 10.2088, 2.4991),
    "resnet50": FirstIteration(1.3924, 9.6073, 1.7823),
    "densenet121": FirstIteration(1.3855, 10.0925, 1.3855),
}

# Table III
SINGLE = {
    "vgg16": {"vdnn": Figures(0.1109, 1.7835), "capuchin": Figures(0.2558, 1.8304), "tensile": Figures(0.2670, 1.6287)},
    "inceptionv3": {"vdnn": Figures(0.1633, 2.5184), "capuchin": Figures(0.4331, 2.7745), "tensile": Figures(0.4361, 1.6468)},
    "inceptionv4": {"vdnn": Figures(0.1903, 2.5028), "capuchin": Figures(0.5129, 3.2362), "tensile": Figures(0.5154, 1.4281)},
    "resnet50": {"vdnn": Figures(0.1733, 2.2981), "capuchin": Figures(0.3859, 2.2320), "tensile": Figures(0.4258, 1.5540)},
    "densenet121": {"vdnn": Figures(0.1381, 2.6148), "capuchin": Figures(0.4860, 3.4400), "tensile": Figures(0.5135, 1.1678)},
}

# Table IV
MIXED = {"vdnn": Figures(0.0580, 1.6297), "capuchin": Figures(0.1150, 7.6545), "tensile": Figures(0.1565, 1.1589)}
