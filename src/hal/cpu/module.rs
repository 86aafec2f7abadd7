//! Modules: tables of ops. The table itself is shared with the null device.

use std::sync::Arc;

use super::Shared;
use crate::error::Result;
use crate::hal::{Module, ModuleImage};

/// Loads ops. Their handles are valid on this device alone, until the module is dropped.
pub(super) fn load(shared: &Shared, image: ModuleImage<'_>) -> Result<Arc<dyn Module>> {
    Ok(Arc::new(shared.functions.load("cpu", image)?))
}
