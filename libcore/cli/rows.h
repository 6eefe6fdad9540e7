// Lists of flat records in the forms that tools print.
#pragma once

#include <string>

#include "libcore/receipt/receipt.h"

namespace fnx {

// `rows`: an array of objects of the same keys, values numbers, strings, booleans, null or lists of numbers. `format`
// is table (aligned, lists cut short) or csv (a line of keys, then one line a row).
std::string rows_text(const Json& rows, const std::string& format);

// A result with such "rows": all of it as json; the rows as csv; as a table what else it says, a line each, and the
// rows.
std::string result_text(const Json& result, const std::string& format);

}  // namespace fnx
