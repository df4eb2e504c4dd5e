#include "json.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <stdexcept>

namespace {

constexpr int kDepth = 100;  // a file of brackets alone must not use up the stack

// Letters that stand for control characters behind a backslash.
const std::string kLetters = "bfnrt", kControls = "\b\f\n\r\t";

// Escapes the same characters in the same way as JSON in Python and JavaScript: digests are over such texts.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (unsigned char c : text) {
    const size_t control = kControls.find(static_cast<char>(c));
    if (c == '"' || c == '\\') {
      result += '\\';
      result += static_cast<char>(c);
    } else if (control != std::string::npos) {
      result += '\\';
      result += kLetters[control];
    } else if (c < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      result += escape;
    } else {
      result += static_cast<char>(c);
    }
  }
  return result + '"';
}

}  // namespace

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Json document() {
    Json value = next(0);
    skip_spaces();
    if (place_ != text_.size()) fail("the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const char* expected) const {
    throw std::runtime_error("no JSON: expected " + std::string(expected) + " at byte " + std::to_string(place_));
  }

  void skip_spaces() {
    while (place_ < text_.size() && std::string(" \t\r\n").find(text_[place_]) != std::string::npos) ++place_;
  }

  bool take(char c) {
    skip_spaces();
    if (place_ >= text_.size() || text_[place_] != c) return false;
    ++place_;
    return true;
  }

  bool take_word(const std::string& word) {
    if (text_.compare(place_, word.size(), word) != 0) return false;
    place_ += word.size();
    return true;
  }

  Json next(int depth) {
    if (depth > kDepth) fail("fewer brackets");
    skip_spaces();
    Json value;
    if (take('{')) {
      value.kind_ = Json::Kind::Object;
      if (take('}')) return value;
      do {
        skip_spaces();
        std::string key = string();
        if (!take(':')) fail("':'");
        value.object_[key] = next(depth + 1);
      } while (take(','));
      if (!take('}')) fail("'}'");
    } else if (take('[')) {
      value.kind_ = Json::Kind::List;
      if (take(']')) return value;
      do {
        value.list_.push_back(next(depth + 1));
      } while (take(','));
      if (!take(']')) fail("']'");
    } else if (place_ < text_.size() && text_[place_] == '"') {
      value.kind_ = Json::Kind::Text;
      value.text_ = string();
    } else if (take_word("true") || take_word("false")) {
      value.kind_ = Json::Kind::Bool;
      value.truth_ = text_[place_ - 2] == 'u';
    } else if (!take_word("null")) {
      value.kind_ = Json::Kind::Number;
      const size_t begin = place_;
      if (take_word("NaN") || take_word("Infinity") || take_word("-Infinity")) {
        value.text_ = text_.substr(begin, place_ - begin);
        value.number_ = value.text_ == "NaN" ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
        if (value.text_[0] == '-') value.number_ = -value.number_;
        return value;
      }
      while (place_ < text_.size() && std::string("+-.eE0123456789").find(text_[place_]) != std::string::npos) ++place_;
      if (place_ == begin) fail("a value");
      value.text_ = text_.substr(begin, place_ - begin);
      char* end = nullptr;
      value.number_ = std::strtod(value.text_.c_str(), &end);
      if (*end != '\0') fail("a number");
    }
    return value;
  }

  std::string string() {
    if (!take('"')) fail("a text");
    std::string result;
    while (place_ < text_.size() && text_[place_] != '"') {
      char c = text_[place_++];
      if (c != '\\') {
        result += c;
        continue;
      }
      if (place_ >= text_.size()) break;
      c = text_[place_++];
      const size_t index = kLetters.find(c);
      if (c == 'u') {
        append_utf8(result, code_point());
      } else {
        result += index == std::string::npos ? c : kControls[index];
      }
    }
    if (place_ >= text_.size()) fail("'\"'");
    ++place_;
    return result;
  }

  uint32_t hexadecimal() {
    if (text_.find_first_not_of("0123456789abcdefABCDEF", place_) < place_ + 4 || place_ + 4 > text_.size()) fail("four digits");
    const uint32_t code = static_cast<uint32_t>(std::strtoul(text_.substr(place_, 4).c_str(), nullptr, 16));
    place_ += 4;
    return code;
  }

  uint32_t code_point() {
    const uint32_t code = hexadecimal();
    // Letters beyond the first 65,536 are written as two escapes.
    if (code < 0xD800 || code > 0xDBFF || !take_word("\\u")) return code;
    return 0x10000 + ((code - 0xD800) << 10) + (hexadecimal() - 0xDC00);
  }

  static void append_utf8(std::string& result, uint32_t code) {
    if (code < 0x80) {
      result += static_cast<char>(code);
      return;
    }
    const int extra = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const int kLead[] = {0, 0xC0, 0xE0, 0xF0};
    result += static_cast<char>(kLead[extra] | (code >> (6 * extra)));
    for (int part = extra - 1; part >= 0; --part) result += static_cast<char>(0x80 | ((code >> (6 * part)) & 0x3F));
  }

  const std::string& text_;
  size_t place_ = 0;
};

Json Json::parse(const std::string& text) { return Parser(text).document(); }

Json Json::of(const std::vector<int64_t>& numbers) {
  Json list;
  list.kind_ = Kind::List;
  for (int64_t number : numbers) list.append(Json(number));
  return list;
}

std::string Json::dump() const {
  std::string result;
  switch (kind_) {
    case Kind::Null:
      return "null";
    case Kind::Bool:
      return truth_ ? "true" : "false";
    case Kind::Text:
      return quoted(text_);
    case Kind::Number: {
      if (!text_.empty()) return text_;
      char digits[32];
      std::snprintf(digits, sizeof digits, "%.17g", number_);
      return digits;
    }
    case Kind::List:
      for (const Json& value : list_) result += (result.empty() ? "" : ",") + value.dump();
      return "[" + result + "]";
    case Kind::Object:
      for (const auto& [key, value] : object_) result += (result.empty() ? "" : ",") + quoted(key) + ":" + value.dump();
      return "{" + result + "}";
  }
  return result;
}

double Json::number() const {
  if (kind_ != Kind::Number) throw std::runtime_error("a number is missing");
  return number_;
}

int64_t Json::integer() const {
  number();
  // Digits only: as a double, an integer beyond 2^53 would be another one.
  char* end = nullptr;
  errno = 0;
  const long long value = std::strtoll(text_.c_str(), &end, 10);
  if (text_.empty() || *end != '\0' || errno != 0) throw std::runtime_error("an integer of 64 bits is missing");
  return value;
}

bool Json::truth() const {
  if (kind_ != Kind::Bool) throw std::runtime_error("true or false is missing");
  return truth_;
}

const std::string& Json::text() const {
  if (kind_ != Kind::Text) throw std::runtime_error("a text is missing");
  return text_;
}

const std::vector<Json>& Json::list() const {
  if (kind_ != Kind::List) throw std::runtime_error("a list is missing");
  return list_;
}

const std::map<std::string, Json>& Json::object() const {
  if (kind_ != Kind::Object) throw std::runtime_error("an object is missing");
  return object_;
}

const Json& Json::at(const std::string& key) const {
  const auto entry = object().find(key);
  if (entry == object_.end()) throw std::runtime_error("the entry '" + key + "' is missing");
  return entry->second;
}

std::vector<int64_t> Json::shape() const {
  std::vector<int64_t> sizes;
  for (const Json& size : list()) {
    sizes.push_back(size.integer());
    if (sizes.back() < 0) throw std::runtime_error("a size is negative");
  }
  return sizes;
}

void Json::set(const std::string& key, Json value) {
  kind_ = Kind::Object;
  object_[key] = std::move(value);
}

void Json::append(Json value) {
  kind_ = Kind::List;
  list_.push_back(std::move(value));
}
