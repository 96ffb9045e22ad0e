//! The product of the betas between two updates, by multiplications and divisions alone: the same
//! bits everywhere, which `exp` and `log` of a C library are not.

/// The betas of all updates, and their running products.
#[derive(Default)]
pub struct Decay {
    betas: Vec<f32>,
    /// After each update: mantissa from 0.5 to 1, and the power of two that it is times.
    products: Vec<(f64, i32)>,
}

impl Decay {
    /// Add an update with this beta, above 0 and below 1.
    pub fn push(&mut self, beta: f32) {
        let (mut mantissa, mut power) = self.products.last().copied().unwrap_or((1.0, 0));
        mantissa *= f64::from(beta);
        while mantissa < 0.5 {
            mantissa *= 2.0;
            power -= 1;
        }
        self.betas.push(beta);
        self.products.push((mantissa, power));
    }

    pub fn betas(&self) -> &[f32] {
        &self.betas
    }

    /// How many updates there were.
    pub fn updates(&self) -> u64 {
        self.betas.len() as u64
    }

    /// What is left after all updates of a mean square that is as it was after `updates` of them.
    pub fn since(&self, updates: u32) -> f32 {
        let product = |updates: usize| match updates {
            0 => (1.0, 0),
            more => self.products[more - 1],
        };
        let ((last, last_power), (now, power)) =
            (product(updates as usize), product(self.products.len()));
        let power = power - last_power;
        if power < -1000 {
            return 0.0; // below every fp32
        }
        let exponent = u64::try_from(1023 + power).unwrap_or_default();
        #[expect(clippy::cast_possible_truncation, reason = "rounded to fp32")]
        let factor = (now / last * f64::from_bits(exponent << 52)) as f32;
        factor
    }
}
