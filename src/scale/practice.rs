//! Customary practice with each optimizer: an initial rate, its scaling with the batch and the range in which that was
//! demonstrated, and its decay. All of it is published for some models, without a guarantee for others.

use altiplano_ir::optimizer::Optimizer;

/// Largest batch of ImageNet images for which Goyal et al. 2017 show that linear scaling loses nothing.
pub(super) const LINEAR_UP_TO: u64 = 8192;

/// The scaling of a rate with the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RateRule {
    Linear,
    SquareRoot,
    Constant,
}

impl RateRule {
    /// The factor of a rate if the batch grows by `growth`.
    pub(crate) fn factor(self, growth: f64) -> f64 {
        match self {
            RateRule::Linear => growth,
            RateRule::SquareRoot => growth.sqrt(),
            RateRule::Constant => 1.0,
        }
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            RateRule::Linear => "linear",
            RateRule::SquareRoot => "by the square root",
            RateRule::Constant => "unchanged",
        }
    }
}

/// The recommended optimizer for a batch, given the planned one, and the scaling of its rate.
pub(crate) fn advised(batch: u64, optimizer: &Optimizer) -> (Optimizer, RateRule) {
    match optimizer {
        Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } if batch > LINEAR_UP_TO => {
            (Optimizer::parse("lars").unwrap_or(*optimizer), RateRule::Linear)
        }
        Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } | Optimizer::Lars { .. } | Optimizer::Larc { .. } => {
            (*optimizer, RateRule::Linear)
        }
        Optimizer::Adadelta { .. } => (*optimizer, RateRule::Constant),
        _ => (*optimizer, RateRule::SquareRoot),
    }
}

/// A customary initial rate, with its source.
pub(super) fn base_rate(optimizer: &Optimizer) -> &'static str {
    match optimizer {
        Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } => {
            "0.1 with momentum and 256 samples of ImageNet (Goyal et al. 2017)"
        }
        Optimizer::Adam { .. } => {
            "1e-3 (Kingma & Ba 2015); large transformers take 6e-4 and less (Brown et al. 2020, table 2.1)"
        }
        Optimizer::Adamw { .. } => {
            "1e-3 (Loshchilov & Hutter 2019); large transformers take 6e-4 and less (Brown et al. 2020, table 2.1)"
        }
        Optimizer::Rmsprop { .. } => "1e-3 (Ruder 2016, section 4.5); 0.045 with an epsilon of 1 (Szegedy et al. 2016)",
        Optimizer::Adagrad { .. } => "1e-2 (Ruder 2016, section 4.3)",
        Optimizer::Adadelta { .. } => "1: it has no rate of its own (Zeiler 2012)",
        Optimizer::Lars { .. } => {
            "5 below 8 k samples of ImageNet, 10 below 16 k, 25 below 32 k, 32 from there on, with a trust of 1e-3 (the\n  ResNet-50 of MLPerf for TPUs, 2018); the ratio of norms makes them small"
        }
        Optimizer::Larc { .. } => {
            "that of SGD, which it never exceeds: 0.1 with momentum and 256 samples of ImageNet (Goyal et al. 2017)"
        }
        Optimizer::Lamb { .. } => "6.25e-4 with 512 samples of BERT (You et al. 2020)",
    }
}

/// The scaling rule for a batch, and the range in which it was demonstrated.
pub(super) fn rule(batch: u64, optimizer: &Optimizer) -> &'static str {
    match optimizer {
        Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } if batch > LINEAR_UP_TO => {
            "LARS with linear scaling: beyond 8192 samples SGD lost accuracy with it (Goyal et al. 2017), LARS was shown up to 32 k on\n  ImageNet (You et al. 2017); --optimizer lars takes it"
        }
        Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } => {
            "linear: shown for SGD with momentum from 256 to 8192 samples on ImageNet (Goyal et al. 2017); the square root keeps the\n  variance of an update (Krizhevsky 2014, Hoffer et al. 2017)"
        }
        Optimizer::Lars { .. } | Optimizer::Larc { .. } => {
            "linear: shown up to 8 k samples for AlexNet and 32 k for ResNet-50 on ImageNet, with a warm-up (You et al. 2017)"
        }
        Optimizer::Lamb { .. } => "square root: shown from 512 to 32 k samples of BERT (You et al. 2020)",
        Optimizer::Adagrad { .. } => {
            "square root, as Adam: the sum of squares averages the same noise, but nothing was shown for Adagrad that we know of"
        }
        Optimizer::Adadelta { .. } => {
            "unchanged: its steps have the units of parameters (Zeiler 2012); no rule was shown that we know of"
        }
        Optimizer::Rmsprop { .. } => {
            "square root: for RMSProp by its noise, shown on images and text while noise outweighs the gradient (Malladi et al. 2022)"
        }
        Optimizer::Adam { .. } | Optimizer::Adamw { .. } => {
            "square root: for Adam by its noise (Malladi et al. 2022), and with LAMB (--optimizer lamb) from 512 to 32 k samples of BERT (You et\n  al. 2020); linear scaling was shown for SGD (Goyal et al. 2017)"
        }
    }
}

/// The decay of the rate over the steps, by options of `altiplano run`.
pub(super) fn decay(optimizer: &Optimizer) -> &'static str {
    match optimizer {
        Optimizer::Sgd { .. } | Optimizer::Nesterov { .. } | Optimizer::Larc { .. } => {
            "step, to a tenth after each 30 epochs (Goyal et al. 2017), or cosine (Loshchilov & Hutter 2017); convergence is proved for\n  inverse, which is 1/t (Robbins & Monro 1951)"
        }
        Optimizer::Adam { .. } | Optimizer::Adamw { .. } => {
            "cosine to a tenth (Brown et al. 2020), linear (Devlin et al. 2019) or inverse-sqrt (Vaswani et al. 2017)"
        }
        Optimizer::Rmsprop { .. } => "exponential, by 0.94 every two epochs (Szegedy et al. 2016)",
        Optimizer::Adagrad { .. } => "constant: its steps fall as 1/sqrt(t) by themselves (Duchi, Hazan & Singer 2011)",
        Optimizer::Adadelta { .. } => "constant (Zeiler 2012)",
        Optimizer::Lars { .. } => "polynomial with a power of 2 (You et al. 2017)",
        Optimizer::Lamb { .. } => "linear, which is a polynomial with a power of 1 (You et al. 2020)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every optimizer has a rate, a rule and a decay, each with its source or a note that there is none.
    #[test]
    fn everything_has_a_source() {
        for name in Optimizer::NAMES {
            let optimizer = Optimizer::parse(name).expect("an optimizer");
            let sourced = |text: &str| text.contains("19") || text.contains("20") || text.contains("that we know of");
            for text in [base_rate(&optimizer), rule(512, &optimizer), rule(1 << 20, &optimizer), decay(&optimizer)] {
                assert!(sourced(text), "{name}: {text}");
            }
            let (_, rate_rule) = advised(512, &optimizer);
            let word = rate_rule.words().trim_start_matches("by the ");
            assert!(rule(512, &optimizer).starts_with(word), "{name}: what is written is not what is said");
        }
        assert_eq!(advised(16384, &Optimizer::sgd()).0.name(), "lars");
        assert_eq!(
            [RateRule::Linear, RateRule::SquareRoot, RateRule::Constant].map(|r| r.factor(16.0)),
            [16.0, 4.0, 1.0]
        );
    }
}
