"""Published drafting heads, suffix trees and translation between tokenizers."""
