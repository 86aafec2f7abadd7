//! Prompts as a user gives them: text through the model's tokenizer.json, or files of token ids.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use crate::error::{Error, Result};

/// A model's tokenizer.
pub(super) struct Text {
    file: PathBuf,
    tokenizer: Tokenizer,
}

impl Text {
    /// Reads `tokenizer.json` of a model directory; `None` if there is none.
    ///
    /// Errors: the file is not what it should be.
    pub(super) fn read(dir: &Path) -> Result<Option<Text>> {
        let file = dir.join("tokenizer.json");
        if !file.exists() {
            return Ok(None);
        }
        let tokenizer = Tokenizer::from_file(&file)
            .map_err(|error| Error::input(format!("{}: {error}", file.display())).help("this is no tokenizer.json"))?;
        Ok(Some(Text { file, tokenizer }))
    }

    /// The ids of `text`, with the special tokens that the tokenizer puts around it.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<i32>> {
        let encoding = self.tokenizer.encode(text, true).map_err(|error| self.failed(&*error))?;
        Ok(encoding.get_ids().iter().map(|&id| id as i32).collect())
    }

    /// The text of `ids`, special tokens left out.
    pub(super) fn decode(&self, ids: &[i32]) -> Result<String> {
        let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
        self.tokenizer.decode(&ids, true).map_err(|error| self.failed(&*error))
    }

    /// Decodes token by token: gives the text that is certain after each, nothing while a character is incomplete.
    pub(super) fn decoder(&self) -> impl FnMut(i32) -> Result<String> + '_ {
        let mut stream = self.tokenizer.decode_stream(true);
        move |id| Ok(stream.step(id as u32).map_err(|error| self.failed(&*error))?.unwrap_or_default())
    }

    fn failed(&self, error: &(dyn std::error::Error + Send + Sync)) -> Error {
        Error::input(format!("{}: {error}", self.file.display()))
    }
}

/// The tokenizer of `--prompt`, which cannot do without.
pub(super) fn needed<'a>(text: Option<&'a Text>, dir: &Path) -> Result<&'a Text> {
    text.ok_or_else(|| {
        Error::input(format!("{}: there is no tokenizer.json to turn text into tokens", dir.display()))
            .help("put the model's tokenizer.json there, or pass token ids with --prompt-ids FILE")
    })
}

/// Reads token ids: a JSON list, or numbers with spaces, commas or line breaks between them.
///
/// Errors name the file and what in it is no token id.
pub(super) fn read_ids(file: &Path) -> Result<Vec<i32>> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        Error::input(format!("{}: {error}", file.display())).help("pass a text file of token ids, such as [1, 17, 4]")
    })?;
    let list = text.trim();
    let list = list.strip_prefix('[').and_then(|list| list.strip_suffix(']')).unwrap_or(list);
    let words = list.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    words
        .map(|word| {
            word.parse().map_err(|_| {
                Error::input(format!("{}: {word} is no token id", file.display()))
                    .help("expected whole numbers: a JSON list, or spaces, commas or line breaks between them")
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_in_every_form() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for text in ["[1, 22,333]\n", "1 22 333", "1\n22\n333\n", "1,22,333"] {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(read_ids(file.path()).unwrap(), [1, 22, 333], "{text}");
        }
        for (text, word) in [("1 x2", "x2"), ("[1, 2", "[1"), ("1.5", "1.5"), ("3000000000", "3000000000")] {
            std::fs::write(file.path(), text).unwrap();
            let error = read_ids(file.path()).unwrap_err();
            assert!(error.message().contains(&format!("{word} is no token id")), "{error}");
        }
    }
}
