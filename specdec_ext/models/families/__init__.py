"""What models of one family compute from slots or columns, made exact for trees and ragged rows."""
