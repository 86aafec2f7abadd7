//! Progress bars on stderr; silent where stderr is no terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::config::ByteCount;
use crate::measure::serve::Progress;

/// One bar for all stages of a run.
pub(super) struct Bar {
    bar: ProgressBar,
    stage: &'static str,
}

impl Bar {
    pub(super) fn new() -> Bar {
        let bar = ProgressBar::new(0);
        let style = ProgressStyle::with_template("{prefix:>10} [{bar:32}] {pos}/{len} {msg}");
        bar.set_style(style.expect("invariant: the template is sound").progress_chars("=> "));
        bar.enable_steady_tick(Duration::from_millis(200));
        Bar { bar, stage: "" }
    }

    /// Shows `done` of `all` of a stage.
    pub(super) fn show(&mut self, stage: &'static str, done: u64, all: u64, message: String) {
        if self.stage != stage {
            self.stage = stage;
            self.bar.set_prefix(stage);
        }
        self.bar.set_length(all);
        self.bar.set_position(done);
        self.bar.set_message(message);
    }

    /// Shows where a serving run stands.
    pub(super) fn serving(&mut self, at: Progress) {
        match at {
            Progress::Capture(at) => {
                let stage = if at.warming { "warming up" } else { "capturing" };
                let message = format!("{} rows, {} free", at.rows, ByteCount(at.free_bytes));
                self.show(stage, at.done as u64, at.total as u64, message);
            }
            Progress::Serve(done, all) => self.show("serving", done.into(), all.into(), "requests".into()),
            Progress::Check(done, all) => self.show("checking", done.into(), all.into(), "requests".into()),
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
