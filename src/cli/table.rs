//! Tables on a terminal.

use comfy_table::{Cell, CellAlignment, ContentLineStyle, LineStyle, Table, TableStyle};

/// One line under the header and space between columns: long tables stay short.
const STYLE: TableStyle = TableStyle::new()
    .header_lines(ContentLineStyle::new(' ', ' ', ' '))
    .header_separator(LineStyle::new('─', '─', '─', '─'))
    .content_lines(ContentLineStyle::new(' ', ' ', ' '));

/// A table whose header is `columns`; those that start with `>` are right-aligned.
pub(super) fn table(columns: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let align = |column: &str| if column.starts_with('>') { CellAlignment::Right } else { CellAlignment::Left };
    let mut table = Table::new();
    table.load_style(STYLE);
    table.set_header(columns.iter().map(|column| Cell::new(column.trim_start_matches('>')).set_alignment(align(column))));
    for row in rows {
        table.add_row(row.into_iter().zip(columns).map(|(text, column)| Cell::new(text).set_alignment(align(column))));
    }
    table.trim_fmt()
}
